// Consistency of the metadata of a KvCache.
#pragma once

#include "runtime/kv_cache/kv_cache.hpp"

namespace kv_test {

using namespace llaisys::runtime;

// Throws when the metadata is inconsistent. O(cells).
inline void check_integrity(const KvCache &cache) {
    for (int32_t s = 0; s < cache.n_streams(); ++s) {
        const KvCells &cells = cache.cells(s);
        int64_t n_used = 0, n_held = 0, n_listed = 0;
        for (int32_t cell = 0; cell < cells.size(); ++cell) {
            const int32_t n = cells.seqs(cell).size();
            n_used += n > 0 ? 1 : 0;
            n_held += n;
            llaisys::ensure((cells.next_free(cell) == cell) == cells.is_free(cell), "cell ", cell,
                            " of stream ", s, " is both free and used");
        }
        llaisys::ensure(n_used == cells.used(), "stream ", s, " counts ", cells.used(),
                        " used cells, has ", n_used);
        for (const int64_t seq : cells.sequence_ids()) {
            llaisys::ensure(cache.stream_of(seq) == s, "sequence ", seq, " of stream ",
                            cache.stream_of(seq), " holds cells of stream ", s);
            const KvCells::Entries &list = cells.entries(seq);
            llaisys::ensure(!list.empty(), "sequence ", seq, " is listed without a cell");
            for (size_t i = 0; i < list.size(); ++i) {
                const KvCells::Entry &e = list[i];
                llaisys::ensure(cells.pos(e.cell) == e.pos && cells.seqs(e.cell).contains(seq),
                                "sequence ", seq, " lists cell ", e.cell, " at position ", e.pos);
                llaisys::ensure(i == 0 || list[i - 1].pos < e.pos ||
                                    (list[i - 1].pos == e.pos && list[i - 1].cell < e.cell),
                                "sequence ", seq, " is out of order at entry ", i);
            }
            n_listed += int64_t(list.size());
        }
        llaisys::ensure(n_listed == n_held, "stream ", s, " lists ", n_listed,
                        " holdings, cells have ", n_held);
        llaisys::ensure(cache.head(s) >= 0 && cache.head(s) < cells.size(), "head ", cache.head(s),
                        " of stream ", s);
    }
    const KvCacheStats stats = cache.stats();
    llaisys::ensure(stats.peak >= stats.used, "peak ", stats.peak, " is below the ", stats.used,
                    " cells in use");
}

} // namespace kv_test
