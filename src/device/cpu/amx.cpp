#include "device/cpu/amx.hpp"

#include "base/check.hpp"
#include "device/cpu/isa.hpp"

#include <atomic>
#include <cstdlib>
#include <string>

#if defined(LLAISYS_HAVE_AMX) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace llaisys::device {

namespace {

std::atomic<bool> is_allowed{true};

bool is_switched_off() {
    const char *value = std::getenv("LLAISYS_CPU_AMX");
    if (value == nullptr || *value == '\0' || value == std::string("on")) {
        return false;
    }
    if (value != std::string("off")) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "LLAISYS_CPU_AMX must be on or off, got '", value, "'");
    }
    return true;
}

#if defined(LLAISYS_HAVE_AMX) && defined(__linux__)

// Leaf 7, EDX: bf16 tile products, tiles, int8 tile products. VNNI and bf16 conversion are checked
// by name, although every core with AMX has them.
bool machine_has_tiles() {
    constexpr unsigned kWanted = 1u << 22 | 1u << 24 | 1u << 25;
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kWanted) == kWanted &&
           __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16");
}

// Whether the operating system saves tile state: bits 17 and 18 of XCR0.
bool system_keeps_tiles() {
    constexpr unsigned kTileState = 3u << 17;
    unsigned eax, edx;
    asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
    return (eax & kTileState) == kTileState;
}

// Request the tile state for all threads of the process.
bool is_permitted() {
    constexpr long kRequestPermission = 0x1023; // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool find_out() {
    return !is_switched_off() && cpu_isa() == Isa::avx512 && machine_has_tiles() &&
           system_keeps_tiles() && is_permitted();
}

#else

bool find_out() {
    is_switched_off(); // rejects an invalid value on every machine
    return false;
}

#endif

} // namespace

bool has_amx() {
    static const bool found = find_out();
    return found;
}

bool uses_amx() { return is_allowed.load(std::memory_order_relaxed) && has_amx(); }

void allow_amx(bool allowed) { is_allowed.store(allowed, std::memory_order_relaxed); }

} // namespace llaisys::device
