"""LangChain's chat model and embeddings for OpenAI."""

from __future__ import annotations

import asyncio

from asked import MAX_TOKENS, MODEL, Choice, report, server
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

URL, KEY, PROMPT = server()
chat = ChatOpenAI(model=MODEL, base_url=URL, api_key=KEY, temperature=0, max_tokens=MAX_TOKENS)
responses = ChatOpenAI(
    model=MODEL,
    base_url=URL,
    api_key=KEY,
    temperature=0,
    max_tokens=MAX_TOKENS,
    use_responses_api=True,
    store=False,
)
# Otherwise the client sends tokens of OpenAI's vocabulary in place of the text.
embeddings = OpenAIEmbeddings(
    model=MODEL, base_url=URL, api_key=KEY, check_embedding_ctx_length=False
)
called = chat.bind_tools([Choice], tool_choice="required").invoke(PROMPT)
report(
    "langchain-openai",
    chat=chat.invoke(PROMPT).content,
    stream="".join(chunk.content for chunk in chat.stream(PROMPT)),
    asynchronous=asyncio.run(chat.ainvoke(PROMPT)).content,
    batch=[answer.content for answer in chat.batch([PROMPT, PROMPT])],
    responses=responses.invoke(PROMPT).text,
    schema=chat.with_structured_output(Choice).invoke(PROMPT).model_dump(),
    tools=called.tool_calls[0]["args"],
    embeddings=embeddings.embed_query(PROMPT),
)
