// Process groups over shared memory.
#include "check.hpp"
#include "parallel/process_group_host.hpp"
#include "random_collectives.hpp"

#include <cerrno>
#include <csignal>
#include <fcntl.h>
#include <functional>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using namespace llaisys;
using namespace llaisys::parallel;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

GroupOptions options_of(const std::string &where, int world, int rank) {
    GroupOptions options;
    options.name = "TP0";
    options.init_method = where;
    options.ranks.clear();
    for (int i = 0; i < world; ++i) {
        options.ranks.push_back(i);
    }
    options.rank = rank;
    options.timeout = seconds(60);
    return options;
}

std::string unique_name() {
    static int counter = 0;
    return text("shm://llaisys-test-", getpid(), "-", counter++);
}

bool is_there(const std::string &where) {
    const int fd = shm_open(where.c_str() + 5, O_RDONLY, 0);
    if (fd >= 0) {
        close(fd);
    }
    return fd >= 0;
}

tensor_t ones(int64_t n) {
    Tensor tensor = Tensor::create({n}, LLAISYS_DTYPE_F32);
    std::fill(tensor.as<float>(), tensor.as<float>() + n, 1.0f);
    return tensor;
}

// Runs body(rank) in a child process, which prints its error.
pid_t start_rank(int rank, const std::function<std::string(int)> &body) {
    std::fflush(stdout);
    const pid_t pid = fork();
    if (pid != 0) {
        return pid;
    }
    std::string result;
    try {
        result = body(rank);
    } catch (const std::exception &error) {
        result = error.what();
    }
    if (!result.empty()) {
        std::fprintf(stderr, "rank %d: %s\n", rank, result.c_str());
    }
    _exit(result.empty() ? 0 : 1);
}

int status_of(pid_t pid) {
    int status = 0;
    waitpid(pid, &status, 0);
    return status;
}

bool all_went_well(int world, const std::function<std::string(int)> &body) {
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < world; ++rank) {
        ranks.push_back(start_rank(rank, body));
    }
    bool well = true;
    for (const pid_t pid : ranks) {
        well = status_of(pid) == 0 && well;
    }
    return well;
}

} // namespace

TEST(random_collectives_match_the_reference) {
    for (const int world : {2, 4}) {
        const std::string where = unique_name();
        CHECK(all_went_well(world, [&](int rank) -> std::string {
            const ProcessGroupShm made(options_of(where, world, rank));
            const ProcessGroup &group = made;
            if (is_there(where)) {
                return "the name still exists";
            }
            return collectives::run_rounds(group, 500 * uint64_t(world), 1200);
        }));
        CHECK(!is_there(where));
    }
}

TEST(asynchronous_calls_may_be_waited_for_in_any_order) {
    const std::string where = unique_name();
    CHECK(all_went_well(2, [&](int rank) {
        const ProcessGroupShm made(options_of(where, 2, rank));
        const ProcessGroup &group = made;
        return collectives::run_async_rounds(group, 99, 60);
    }));
}

TEST(ranks_join_through_an_inherited_file_descriptor) {
    const int fd = int(syscall(SYS_memfd_create, "llaisys-test", 0u));
    CHECK(fd >= 0);
    const std::string where = text("fd://", fd);
    CHECK(all_went_well(3, [&](int rank) {
        const ProcessGroupShm made(options_of(where, 3, rank));
        const ProcessGroup &group = made;
        return collectives::run_rounds(group, 7, 200);
    }));
    close(fd);
}

TEST(killed_rank_aborts_the_group_with_a_reason) {
    for (const int killed : {0, 1, 2}) {
        const std::string where = unique_name();
        const auto body = [&](int rank) -> std::string {
            const ProcessGroupShm made(options_of(where, 3, rank));
            const ProcessGroup &group = made;
            for (int i = 0;; ++i) {
                if (rank == killed && i == 100) {
                    kill(getpid(), SIGKILL);
                }
                const auto start = steady_clock::now();
                try {
                    group.AllReduce(ones(896));
                } catch (const Error &error) {
                    const std::string what = error.what();
                    const auto waited = steady_clock::now() - start;
                    const bool names_rank =
                        what.find(text("AllReduce: group TP0, rank ", rank, " of 3, cpu:0: rank ",
                                       killed, " (process ")) == 0 &&
                        what.find("has died") != std::string::npos;
                    return names_rank && waited < seconds(5) ? "" : what;
                }
            }
        };
        std::vector<pid_t> ranks;
        for (int rank = 0; rank < 3; ++rank) {
            ranks.push_back(start_rank(rank, body));
        }
        // The killed process is reaped last: the others must detect it while it is a zombie.
        for (int rank = 0; rank < 3; ++rank) {
            if (rank != killed) {
                CHECK_EQ(status_of(ranks[size_t(rank)]), 0);
            }
        }
        CHECK_EQ(WTERMSIG(status_of(ranks[size_t(killed)])), SIGKILL);
        CHECK(!is_there(where));
    }
}

TEST(killed_rank_ends_the_waits_of_its_sender_and_its_receiver) {
    const std::string where = unique_name();
    const auto body = [&](int rank) -> std::string {
        const ProcessGroupShm made(options_of(where, 3, rank));
        const ProcessGroup &group = made;
        const tensor_t few = ones(3), many = ones(100000); // more than one message
        try {
            if (rank == 2) {
                group.Send(few, 1);
                group.Send(many, 1);
            } else if (rank == 1) {
                group.Recv(few, 2);
                group.Send(few, 0);
                kill(getpid(), SIGKILL);
            } else {
                group.Recv(few, 1);
                group.Recv(many, 1);
            }
        } catch (const Error &error) {
            const std::string what = error.what();
            const std::string call = rank == 2 ? "Send" : "Recv";
            return what.find(call) == 0 && what.find("rank 1 (process ") != std::string::npos &&
                           what.find("has died") != std::string::npos
                       ? ""
                       : what;
        }
        return "nothing was thrown";
    };
    const pid_t killed = start_rank(1, body);
    const pid_t sender = start_rank(2, body);
    CHECK_EQ(status_of(start_rank(0, body)), 0);
    CHECK_EQ(status_of(sender), 0);
    CHECK_EQ(WTERMSIG(status_of(killed)), SIGKILL);
}

TEST(name_is_unlinked_when_a_rank_dies_before_all_have_joined) {
    const std::string where = unique_name();
    const pid_t dead = start_rank(0, [&](int rank) -> std::string {
        const ProcessGroupShm made(options_of(where, 3, rank));
        return "";
    });
    const pid_t waiting = start_rank(1, [&](int rank) -> std::string {
        try {
            const ProcessGroupShm made(options_of(where, 3, rank));
        } catch (const Error &error) {
            const std::string what = error.what();
            return what.find("rank 0") != std::string::npos &&
                           what.find("has died") != std::string::npos
                       ? ""
                       : what;
        }
        return "nothing was thrown";
    });
    // Both ranks hold their lock on the file before they join.
    for (;;) {
        const int fd = shm_open(where.c_str() + 5, O_RDWR, 0);
        struct flock both{};
        both.l_type = F_WRLCK;
        both.l_whence = SEEK_SET;
        int held = 0;
        for (int rank = 0; rank < 2 && fd >= 0; ++rank) {
            struct flock byte = both;
            byte.l_start = rank;
            byte.l_len = 1;
            held += fcntl(fd, F_GETLK, &byte) == 0 && byte.l_type != F_UNLCK;
        }
        if (fd >= 0) {
            close(fd);
        }
        if (held == 2) {
            break;
        }
        usleep(1000);
    }
    usleep(50000); // for the rank to join; if it does not, its death is detected later
    kill(dead, SIGKILL);
    CHECK_EQ(status_of(waiting), 0);
    status_of(dead);
    CHECK(!is_there(where));
}

TEST(leaving_rank_is_not_reported_as_dead) {
    const std::string where = unique_name();
    CHECK(all_went_well(2, [&](int rank) -> std::string {
        const ProcessGroupShm made(options_of(where, 2, rank));
        const ProcessGroup &group = made;
        group.AllReduce(ones(3));
        if (rank == 1) {
            return "";
        }
        try {
            group.AllReduce(ones(3));
        } catch (const Error &error) {
            const std::string what = error.what();
            return what.find("rank 1 has left the group") != std::string::npos ? "" : what;
        }
        return "nothing was thrown";
    }));
}

TEST(invalid_init_method_is_rejected) {
    CHECK_THROWS(ProcessGroupShm(options_of("tcp://here:1", 2, 0)), "fd://N or shm://NAME");
    CHECK_THROWS(ProcessGroupShm(options_of("shm://a/b", 2, 0)), "shm://a/b");
    CHECK_THROWS(ProcessGroupShm(options_of("fd://x", 2, 0)), "fd://x");
    CHECK_THROWS(ProcessGroupShm(options_of("fd://987654", 2, 0)), "fd://987654");
    const int fd = int(syscall(SYS_memfd_create, "llaisys-test", 0u));
    CHECK(ftruncate(fd, 12345) == 0);
    CHECK_THROWS(ProcessGroupShm(options_of(text("fd://", fd), 2, 0)), "12345");
}
