#pragma once

#include <string>

namespace llaisys::device {

// CPUs' worth of time that the control groups of this process grant: the smallest CPU quota of its
// group and the groups above it. 0: no quota. Reads cgroup v2 (cpu.max) and v1 (cpu.cfs_quota_us).
// `membership` is /proc/self/cgroup, `root` the directory where the hierarchies are mounted.
double cpu_quota(const std::string &membership = "/proc/self/cgroup",
                 const std::string &root = "/sys/fs/cgroup");

// Whole cores for threads that compute all the time, at least 1: the CPUs in the affinity mask of
// the calling thread, or fewer with a CPU quota. A fraction of a core gets no thread.
int usable_cores(double quota = cpu_quota());

} // namespace llaisys::device
