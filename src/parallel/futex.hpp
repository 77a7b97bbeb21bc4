// Futex wait and wake on a word of shared memory.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace llaisys::parallel {

// Returns when woken, when the word is not `seen`, after `limit`, or spuriously.
void sleep_on(const std::atomic<uint32_t> &word, uint32_t seen, std::chrono::milliseconds limit);
void wake_all(const std::atomic<uint32_t> &word);

} // namespace llaisys::parallel
