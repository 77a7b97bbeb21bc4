#include "device/cpu/usable_cores.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#ifdef __linux__
#include <sched.h>
#endif

namespace llaisys::device {

namespace {

// Both numbers of one group; {0, 0}: no quota. "max" of cpu.max and -1 of cpu.cfs_quota_us are none.
struct Quota {
    double microseconds = 0;
    double period = 0;
};

Quota read_v2(const std::string &group) {
    Quota quota;
    std::ifstream(group + "/cpu.max") >> quota.microseconds >> quota.period;
    return quota;
}

Quota read_v1(const std::string &group) {
    Quota quota;
    std::ifstream(group + "/cpu.cfs_quota_us") >> quota.microseconds;
    std::ifstream(group + "/cpu.cfs_period_us") >> quota.period;
    return quota;
}

bool has_cpu_controller(const std::string &controllers) {
    std::istringstream names(controllers);
    for (std::string name; std::getline(names, name, ',');) {
        if (name == "cpu") {
            return true;
        }
    }
    return false;
}

// The smallest quota of `path` and its parents below `mount`. A container may see the path of the
// host while its own group is the root of the mount: directories that do not exist are skipped.
void lower_to_groups(double &cores, const std::string &mount, std::string path,
                     Quota (*read)(const std::string &)) {
    while (true) {
        const Quota quota = read(mount + path);
        if (quota.microseconds > 0 && quota.period > 0) {
            const double granted = quota.microseconds / quota.period;
            cores = cores > 0 ? std::min(cores, granted) : granted;
        }
        if (path.empty() || path == "/") {
            return;
        }
        path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
}

} // namespace

double cpu_quota(const std::string &membership, const std::string &root) {
    double cores = 0;
    std::ifstream lines(membership);
    for (std::string line; std::getline(lines, line);) { // "hierarchy:controllers:path"
        const size_t first = line.find(':');
        const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
        if (second == std::string::npos) {
            continue;
        }
        const std::string controllers = line.substr(first + 1, second - first - 1);
        const std::string path = line.substr(second + 1);
        if (controllers.empty()) {
            lower_to_groups(cores, root, path, read_v2);
        } else if (has_cpu_controller(controllers)) {
            lower_to_groups(cores, root + "/" + controllers, path, read_v1);
            if (controllers != "cpu") { // usually mounted as cpu,cpuacct with a link named cpu
                lower_to_groups(cores, root + "/cpu", path, read_v1);
            }
        }
    }
    return cores;
}

int usable_cores(double quota) {
    int cores = std::max(1, int(std::thread::hardware_concurrency()));
#ifdef __linux__
    // Machines with more CPUs than a cpu_set_t holds need a larger mask.
    for (int capacity = CPU_SETSIZE; capacity <= (1 << 16); capacity *= 4) {
        std::vector<cpu_set_t> mask(size_t(capacity / CPU_SETSIZE));
        const size_t bytes = mask.size() * sizeof(cpu_set_t);
        if (sched_getaffinity(0, bytes, mask.data()) == 0) {
            cores = std::max(1, CPU_COUNT_S(bytes, mask.data()));
            break;
        }
    }
#endif
    return quota > 0 ? std::clamp(int(quota), 1, cores) : cores;
}

} // namespace llaisys::device
