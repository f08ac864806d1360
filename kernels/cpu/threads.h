// Shares work among the threads that PyTorch's own operations use.
#pragma once

// libgomp's entry to a parallel region. Python passes that of the OpenMP library which PyTorch has
// loaded, so that no second pool of threads spins beside it. Null: one thread does all.
typedef void (*ParallelRegion)(void (*work)(void *), void *argument, unsigned num_threads, unsigned flags);

extern ParallelRegion parallel_region;

// Calls work(i) for each i below count, on up to num_threads threads. No result may depend on which
// thread computes it.
template <typename Work> void share(long count, long num_threads, const Work &work) {
    struct Shared {
        const Work &work;
        long count, next;
    } shared{work, count, 0};
    auto run = [](void *argument) {
        Shared &own = *static_cast<Shared *>(argument);
        for (;;) {
            const long index = __atomic_fetch_add(&own.next, 1, __ATOMIC_RELAXED);
            if (index >= own.count) return;
            own.work(index);
        }
    };
    if (num_threads > count) num_threads = count;
    if (num_threads <= 1 || !parallel_region)
        run(&shared);
    else
        parallel_region(run, &shared, static_cast<unsigned>(num_threads), 0);
}

// The elements that a thread takes at a time: fewer take less time than waking the threads.
constexpr long PIECE_ELEMENTS = 8 << 10;

// Calls work(row) for each row of this many elements.
template <typename Work> void share_rows(long num_rows, long row_size, long num_threads, const Work &work) {
    const long piece = row_size < PIECE_ELEMENTS ? PIECE_ELEMENTS / row_size : 1;
    share((num_rows + piece - 1) / piece, num_threads, [&](long index) {
        const long end = (index + 1) * piece < num_rows ? (index + 1) * piece : num_rows;
        for (long row = index * piece; row < end; row++) work(row);
    });
}
