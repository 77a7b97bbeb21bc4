// The CPU quota of a fake tree of control groups, and the threads that a pool starts under it.
#include "check.hpp"
#include "device/cpu/thread_pool.hpp"
#include "device/cpu/usable_cores.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

using llaisys::device::cpu_quota;
using llaisys::device::ThreadPool;
using llaisys::device::usable_cores;
namespace fs = std::filesystem;

namespace {

// A directory that stands for /sys/fs/cgroup, with a file that stands for /proc/self/cgroup.
struct FakeGroups {
    fs::path root;

    FakeGroups() {
        std::string name = (fs::temp_directory_path() / "llaisys-cgroup-XXXXXX").string();
        root = mkdtemp(name.data());
    }
    ~FakeGroups() { fs::remove_all(root); }

    void write(const std::string &path, const std::string &text) const {
        fs::create_directories((root / path).parent_path());
        std::ofstream(root / path) << text;
    }
    double quota(const std::string &membership) const {
        write("membership", membership);
        return cpu_quota((root / "membership").string(), root.string());
    }
};

} // namespace

TEST(no_control_group_is_no_quota) {
    const FakeGroups groups;
    CHECK_EQ(cpu_quota((groups.root / "missing").string(), groups.root.string()), 0.0);
    CHECK_EQ(groups.quota("0::/\n"), 0.0);
    CHECK_EQ(groups.quota("nonsense\n:\n"), 0.0);
}

TEST(v2_quota_is_the_smallest_on_the_way_up) {
    const FakeGroups groups;
    groups.write("cpu.max", "max 100000\n");
    groups.write("a/cpu.max", "200000 100000\n");
    groups.write("a/b/cpu.max", "800000 100000\n");
    CHECK_EQ(groups.quota("0::/\n"), 0.0);
    CHECK_EQ(groups.quota("0::/a\n"), 2.0);
    CHECK_EQ(groups.quota("0::/a/b\n"), 2.0);
    CHECK_EQ(groups.quota("0::/a/b/missing\n"), 2.0);
}

TEST(a_container_that_sees_the_path_of_the_host_uses_the_root_of_the_mount) {
    const FakeGroups groups;
    groups.write("cpu.max", "150000 100000\n");
    CHECK_EQ(groups.quota("0::/docker/0123\n"), 1.5);
}

TEST(v1_quota) {
    const FakeGroups groups;
    groups.write("cpu,cpuacct/pod/cpu.cfs_quota_us", "300000\n");
    groups.write("cpu,cpuacct/pod/cpu.cfs_period_us", "100000\n");
    groups.write("cpu,cpuacct/cpu.cfs_quota_us", "-1\n");
    groups.write("cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(groups.quota("3:cpuset:/pod\n2:cpu,cpuacct:/pod\n0::/\n"), 3.0);
    CHECK_EQ(groups.quota("2:cpu,cpuacct:/\n"), 0.0);
    CHECK_EQ(groups.quota("2:cpuacct:/pod\n"), 0.0);
    const FakeGroups linked; // the mount has the name of one controller
    linked.write("cpu/cpu.cfs_quota_us", "50000\n");
    linked.write("cpu/cpu.cfs_period_us", "100000\n");
    CHECK_EQ(linked.quota("2:cpu,cpuacct:/pod\n"), 0.5);
}

TEST(a_quota_lowers_the_cores_to_a_whole_number_of_at_least_one) {
    const int cores = usable_cores(0);
    CHECK(cores >= 1 && cores <= int(std::thread::hardware_concurrency()));
    CHECK_EQ(usable_cores(0.25), 1);
    CHECK_EQ(usable_cores(1.9), 1);
    CHECK_EQ(usable_cores(cores + 0.5), cores);
    CHECK_EQ(usable_cores(10.0 * cores), cores);
}

TEST(a_pool_starts_no_more_threads_than_usable_cores) {
    CHECK_EQ(ThreadPool(0).size(), usable_cores());
}

#ifdef __linux__
TEST(a_pool_follows_the_affinity_of_its_thread) {
    std::thread([] {
        cpu_set_t mask;
        CHECK_EQ(sched_getaffinity(0, sizeof(mask), &mask), 0);
        int cpu = 0;
        while (!CPU_ISSET(cpu, &mask)) {
            ++cpu;
        }
        CPU_ZERO(&mask);
        CPU_SET(cpu, &mask);
        CHECK_EQ(sched_setaffinity(0, sizeof(mask), &mask), 0);
        CHECK_EQ(ThreadPool(0).size(), 1);
    }).join();
}
#endif
