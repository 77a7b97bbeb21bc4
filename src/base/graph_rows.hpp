// Row counts of captured steps (CUDA graphs). Rows are padded, so that few graphs serve all steps.
#pragma once

#include <cstdint>

namespace llaisys {

constexpr int64_t kMaxGraphRows = 512;
// Tokens of a step with draft tokens: up to here it treats every token as a run of one and replays
// a graph, because reading keys again from L2 takes less time than launching the kernels one by one.
constexpr int64_t kMaxGraphDraftRows = 64;

// The rows that a step of `rows` rows is padded to; 0: it is not captured.
constexpr int64_t graph_rows(int64_t rows, bool has_drafts = false) {
    if (rows < 1 || rows > (has_drafts ? kMaxGraphDraftRows : kMaxGraphRows)) {
        return 0;
    }
    int64_t padded = 1;
    while (padded < rows && padded < 8) {
        padded *= 2;
    }
    // Increments of 8 rows, then of an eighth to a quarter of the rows.
    for (int64_t step = 8; padded < rows; padded += step) {
        while (padded >= 8 * step) {
            step *= 2;
        }
    }
    return padded;
}

} // namespace llaisys
