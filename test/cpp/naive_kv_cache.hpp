// Reference KvCache: a list of cells, for test_kv_random.cpp. Include once.
#pragma once

#include "kv_helpers.hpp"

#include <algorithm>
#include <map>
#include <set>

namespace kv_test {

// The documented rules, implemented naively.
struct Naive {
    struct Cell {
        int64_t pos = -1, shift = 0;
        std::set<int64_t> seqs;
        int bytes = -1; // id of the write that filled it
    };
    int32_t n_cells;
    int64_t max_positions;
    std::vector<std::vector<Cell>> streams;
    std::vector<int32_t> heads;
    std::map<int64_t, int32_t> stream_of;
    int64_t peak = 0;

    Naive(int32_t n_streams, int32_t cells, int64_t positions)
        : n_cells(cells), max_positions(positions),
          streams(size_t(n_streams), std::vector<Cell>(size_t(cells))),
          heads(size_t(n_streams), 0) {}

    std::vector<Cell> &cells_of(int64_t seq) { return streams[size_t(stream_of[seq])]; }
    int64_t used() const {
        int64_t n = 0;
        for (const auto &stream : streams) {
            n += std::count_if(stream.begin(), stream.end(),
                               [](auto &c) { return !c.seqs.empty(); });
        }
        return n;
    }
    bool take(int32_t stream, int64_t pos, const std::set<int64_t> &seqs, int32_t *slot) {
        for (int32_t step = 0; step < n_cells; ++step) {
            const int32_t cell = (heads[size_t(stream)] + step) % n_cells;
            Cell &c = streams[size_t(stream)][size_t(cell)];
            if (c.seqs.empty()) {
                c.pos = pos;
                c.shift = 0;
                c.seqs = seqs;
                heads[size_t(stream)] = (cell + 1) % n_cells;
                *slot = stream * n_cells + cell;
                return true;
            }
        }
        return false;
    }
    KvStatus decode(const Batch &batch, std::vector<int32_t> *slots) {
        for (size_t i = 0; i < batch.positions.size(); ++i) {
            std::set<int32_t> where;
            for (int32_t s = batch.offsets[i]; s < batch.offsets[i + 1]; ++s) {
                if (batch.seq_ids[size_t(s)] < 0) {
                    return LLAISYS_KV_INVALID_SEQ;
                }
                where.insert(stream_of[batch.seq_ids[size_t(s)]]);
            }
            if (where.size() != 1) {
                return LLAISYS_KV_INVALID_SEQ;
            }
            if (batch.positions[i] < 0 || batch.positions[i] >= max_positions) {
                return LLAISYS_KV_INVALID_POS;
            }
        }
        const auto streams_before = streams;
        const auto heads_before = heads;
        for (size_t i = 0; i < batch.positions.size(); ++i) {
            const std::set<int64_t> seqs(batch.seq_ids.begin() + batch.offsets[i],
                                         batch.seq_ids.begin() + batch.offsets[i + 1]);
            int32_t slot = 0;
            if (!take(stream_of[*seqs.begin()], batch.positions[i], seqs, &slot)) {
                streams = streams_before;
                heads = heads_before;
                return LLAISYS_KV_OOM_SLOT;
            }
            slots->push_back(slot);
        }
        peak = std::max(peak, used());
        return LLAISYS_KV_OK;
    }
    // Checks 1 to 4; the hits as (pos, cell).
    KvStatus find(int64_t seq, int64_t p0, int64_t p1,
                  std::vector<std::pair<int64_t, int32_t>> *hits) {
        p0 = std::max<int64_t>(p0, 0);
        p1 = p1 < 0 ? kFar : p1;
        if (seq < 0) {
            return LLAISYS_KV_INVALID_SEQ;
        }
        if (p0 >= p1) {
            return LLAISYS_KV_EMPTY_RANGE;
        }
        bool holds = false;
        auto &cells = cells_of(seq);
        for (int32_t c = 0; c < n_cells; ++c) {
            if (cells[size_t(c)].seqs.count(seq) != 0) {
                holds = true;
                if (cells[size_t(c)].pos >= p0 && cells[size_t(c)].pos < p1) {
                    hits->push_back({cells[size_t(c)].pos, c});
                }
            }
        }
        std::sort(hits->begin(), hits->end());
        return !holds          ? LLAISYS_KV_INVALID_SEQ
               : hits->empty() ? LLAISYS_KV_EMPTY_RANGE
                               : LLAISYS_KV_OK;
    }
    KvStatus cp(int64_t dst, int64_t src, int64_t p0, int64_t p1) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        if (dst < 0) {
            return LLAISYS_KV_INVALID_SEQ;
        }
        const KvStatus status = find(src, p0, p1, &hits);
        if (status != LLAISYS_KV_OK || dst == src) {
            return status;
        }
        const int32_t to = stream_of[dst];
        auto &cells = cells_of(src);
        if (to == stream_of[src]) {
            for (const auto &hit : hits) {
                cells[size_t(hit.second)].seqs.insert(dst);
            }
            return LLAISYS_KV_OK;
        }
        int64_t n_free = 0;
        for (const Cell &cell : streams[size_t(to)]) {
            n_free += cell.seqs.empty();
        }
        if (n_free < int64_t(hits.size())) {
            return LLAISYS_KV_OOM_SLOT;
        }
        for (const auto &hit : hits) {
            int32_t slot = 0;
            take(to, hit.first, {dst}, &slot);
            Cell &copy = streams[size_t(to)][size_t(slot % n_cells)];
            copy.shift = cells[size_t(hit.second)].shift;
            copy.bytes = cells[size_t(hit.second)].bytes; // copied at once
        }
        peak = std::max(peak, used());
        return LLAISYS_KV_OK;
    }
    KvStatus rm(int64_t seq, int64_t p0, int64_t p1) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        const KvStatus status = find(seq, p0, p1, &hits);
        if (status == LLAISYS_KV_OK) {
            for (const auto &hit : hits) {
                cells_of(seq)[size_t(hit.second)].seqs.erase(seq);
            }
        }
        return status;
    }
    KvStatus add(int64_t seq, int64_t p0, int64_t p1, int64_t delta) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        const KvStatus status = find(seq, p0, p1, &hits);
        if (status != LLAISYS_KV_OK) {
            return status;
        }
        for (const auto &hit : hits) {
            if (hit.first + delta < 0 || hit.first + delta >= max_positions) {
                return LLAISYS_KV_INVALID_POS;
            }
        }
        for (const auto &hit : hits) {
            cells_of(seq)[size_t(hit.second)].pos += delta;
            cells_of(seq)[size_t(hit.second)].shift += delta;
        }
        return LLAISYS_KV_OK;
    }
    KvStatus keep(int64_t seq) {
        std::vector<std::pair<int64_t, int32_t>> hits;
        if (find(seq, 0, -1, &hits) != LLAISYS_KV_OK) {
            return LLAISYS_KV_INVALID_SEQ;
        }
        for (auto &stream : streams) {
            for (Cell &cell : stream) {
                const bool stays = cell.seqs.count(seq) != 0;
                cell.seqs.clear();
                if (stays) {
                    cell.seqs.insert(seq);
                }
            }
        }
        return LLAISYS_KV_OK;
    }
    // The text of KvCache::dump without the tokens, and the head of each stream.
    std::string state() const {
        std::string text;
        for (size_t s = 0; s < streams.size(); ++s) {
            for (int32_t c = 0; c < n_cells; ++c) {
                const Cell &cell = streams[s][size_t(c)];
                if (cell.seqs.empty()) {
                    continue;
                }
                text += llaisys::text("cell[", int32_t(s) * n_cells + c, "] = {seq_ids=[");
                const char *comma = "";
                for (const int64_t seq : cell.seqs) {
                    text += llaisys::text(comma, seq);
                    comma = ", ";
                }
                text += llaisys::text("], pos=", cell.pos, ", used=1}\n");
            }
        }
        text += llaisys::text("used ", used(), " peak ", peak, " heads");
        for (const int32_t head : heads) {
            text += llaisys::text(' ', head);
        }
        return text;
    }
    std::string list(const std::vector<int64_t> &seqs) const {
        std::set<std::pair<int64_t, int32_t>> found;
        for (size_t s = 0; s < streams.size(); ++s) {
            for (int32_t c = 0; c < n_cells; ++c) {
                for (const int64_t seq : seqs) {
                    if (streams[s][size_t(c)].seqs.count(seq) != 0) {
                        found.insert({streams[s][size_t(c)].pos, int32_t(s) * n_cells + c});
                    }
                }
            }
        }
        std::string text;
        for (const auto &entry : found) {
            text += llaisys::text(text.empty() ? "" : " ", entry.first, "@", entry.second);
        }
        return text;
    }
};

} // namespace kv_test
