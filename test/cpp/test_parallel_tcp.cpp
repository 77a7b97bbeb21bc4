// Process groups over TCP; ranks are threads or processes of this machine.
#include "check.hpp"
#include "parallel/process_group_host.hpp"
#include "parallel/socket_connect.hpp"
#include "random_collectives.hpp"

#include <arpa/inet.h>
#include <csignal>
#include <fcntl.h>
#include <functional>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace {

using namespace llaisys;
using namespace llaisys::parallel;
using std::chrono::seconds;
using std::chrono::steady_clock;

// Listening sockets of all ranks.
struct Listeners {
    explicit Listeners(int world) {
        for (int i = 0; i < world; ++i) {
            sockaddr_in address{};
            address.sin_family = AF_INET;
            address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
            const int fd = socket(AF_INET, SOCK_STREAM, 0);
            socklen_t size = sizeof address;
            CHECK(bind(fd, reinterpret_cast<sockaddr *>(&address), size) == 0);
            CHECK(listen(fd, 16) == 0);
            CHECK(getsockname(fd, reinterpret_cast<sockaddr *>(&address), &size) == 0);
            fds.push_back(fd);
            ports.push_back(ntohs(address.sin_port));
        }
    }
    GroupOptions options(int rank, const std::string &token = "5e0f") const {
        GroupOptions options;
        options.name = "TP0";
        options.init_method = text("tcp://", fds[size_t(rank)], ":", token, "@");
        options.ranks.clear();
        for (size_t i = 0; i < fds.size(); ++i) {
            options.init_method += text(i > 0 ? "," : "", "127.0.0.1:", ports[i]);
            options.ranks.push_back(int(i));
        }
        options.rank = rank;
        options.timeout = seconds(60);
        return options;
    }

    std::vector<int> fds;
    std::vector<int> ports;
};

// Runs body(group) in a thread per rank; the concatenated results and exception texts.
std::string in_threads(int world, const std::function<std::string(const ProcessGroup &)> &body) {
    const Listeners listeners(world);
    std::vector<std::string> results(size_t(world), "");
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world; ++rank) {
        threads.emplace_back([&, rank] {
            try {
                const ProcessGroupTcp group(listeners.options(rank));
                results[size_t(rank)] = body(group);
            } catch (const std::exception &error) {
                results[size_t(rank)] = error.what();
            }
        });
    }
    std::string all;
    for (int rank = 0; rank < world; ++rank) {
        threads[size_t(rank)].join();
        all += results[size_t(rank)];
    }
    return all;
}

tensor_t ones(int64_t n) {
    Tensor tensor = Tensor::create({n}, LLAISYS_DTYPE_F32);
    std::fill(tensor.as<float>(), tensor.as<float>() + n, 1.0f);
    return tensor;
}

std::string failure_of(const ProcessGroup &group) {
    try {
        group.AllReduce(ones(3));
    } catch (const Error &error) {
        return error.what();
    }
    return "nothing was thrown";
}

} // namespace

TEST(random_collectives_match_the_reference) {
    for (const int world : {2, 3}) {
        CHECK_EQ(in_threads(world,
                            [&](const ProcessGroup &group) {
                                return collectives::run_rounds(group, 900 * uint64_t(world), 400);
                            }),
                 std::string());
    }
}

TEST(asynchronous_calls_may_be_waited_for_in_any_order) {
    CHECK_EQ(in_threads(3,
                        [](const ProcessGroup &group) {
                            return collectives::run_async_rounds(group, 77, 20);
                        }),
             std::string());
}

TEST(message_sent_before_a_collective_is_received_after_it) {
    CHECK_EQ(in_threads(2,
                        [](const ProcessGroup &group) -> std::string {
                            const tensor_t mail = ones(5);
                            if (group.rank() == 0) {
                                group.Send(mail, 1);
                            }
                            const tensor_t sum = ones(2);
                            group.AllReduce(sum);
                            if (group.rank() == 1) {
                                const tensor_t taken = Tensor::create({5}, LLAISYS_DTYPE_F32);
                                group.Recv(taken, 0);
                                return taken.as<float>()[4] == 1 ? "" : "other values";
                            }
                            return sum.as<float>()[1] == 2 ? "" : "another sum";
                        }),
             std::string());
}

TEST(killed_rank_aborts_the_group_with_a_reason) {
    for (const int killed : {0, 2}) {
        const Listeners listeners(3);
        std::vector<pid_t> ranks;
        for (int rank = 0; rank < 3; ++rank) {
            std::fflush(stdout);
            const pid_t pid = fork();
            if (pid != 0) {
                ranks.push_back(pid);
                continue;
            }
            std::string what = "never failed";
            const auto start = steady_clock::now();
            try {
                const ProcessGroupTcp made(listeners.options(rank));
                const ProcessGroup &group = made;
                for (int i = 0; i < 1 << 20; ++i) {
                    if (rank == killed && i == 50) {
                        kill(getpid(), SIGKILL);
                    }
                    group.AllReduce(ones(896));
                }
            } catch (const Error &error) {
                what = error.what();
            }
            const std::string start_of =
                text("AllReduce: group TP0, rank ", rank, " of 3, cpu:0: ");
            const bool names_rank =
                what.find(start_of) == 0 &&
                what.find(text("rank ", killed, " disconnected")) != std::string::npos;
            if (!names_rank || steady_clock::now() - start > seconds(30)) {
                std::fprintf(stderr, "rank %d: %s\n", rank, what.c_str());
            }
            _exit(names_rank ? 0 : 1);
        }
        for (const int fd : listeners.fds) {
            close(fd); // the children own copies
        }
        for (int rank = 0; rank < 3; ++rank) {
            int status = 0;
            waitpid(ranks[size_t(rank)], &status, 0);
            CHECK(rank == killed ? WIFSIGNALED(status) : status == 0);
        }
    }
}

TEST(rank_that_leaves_ends_the_waits_of_its_sender_and_its_receiver) {
    const std::string errors = in_threads(3, [](const ProcessGroup &group) -> std::string {
        const tensor_t few = ones(3), many = ones(1 << 16);
        try {
            if (group.rank() == 2) {
                group.Send(few, 1);
                for (int i = 0; i < 10000; ++i) { // the receiver may take some of them
                    group.Send(many, 1);
                }
            } else if (group.rank() == 1) {
                group.Recv(few, 2);
                group.Send(few, 0);
                return "";
            } else {
                group.Recv(few, 1);
                group.Recv(many, 1);
            }
        } catch (const Error &error) {
            const std::string what = error.what();
            const bool names_rank = what.find("rank 1 disconnected") != std::string::npos;
            return names_rank ? "" : what;
        }
        return "nothing was thrown";
    });
    CHECK_EQ(errors, std::string());
}

TEST(abort_sends_its_reason_to_the_other_ranks) {
    const std::string error_text = in_threads(2, [](const ProcessGroup &group) -> std::string {
        group.AllReduce(ones(3));
        if (group.rank() == 1) {
            group.Abort("out of ideas");
            return "";
        }
        return failure_of(group);
    });
    CHECK(error_text.find("AllReduce: group TP0, rank 0 of 2, cpu:0: out of ideas") == 0);
}

TEST(mismatched_calls_fail_and_name_both_calls) {
    const std::string error_text = in_threads(2, [](const ProcessGroup &group) -> std::string {
        try {
            group.AllReduce(ones(3 + group.rank()));
        } catch (const Error &error) {
            return error.what();
        }
        return "nothing was thrown";
    });
    CHECK(error_text.find("called AllReduce(sum, f32, 4 elements)") != std::string::npos);
    CHECK(error_text.find("called AllReduce(sum, f32, 3 elements)") != std::string::npos);
}

TEST(connection_without_the_token_is_rejected_and_the_group_still_forms) {
    const Listeners listeners(2);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(uint16_t(listeners.ports[0]));
    const int stranger = socket(AF_INET, SOCK_STREAM, 0);
    CHECK(connect(stranger, reinterpret_cast<sockaddr *>(&address), sizeof address) == 0);
    const std::vector<char> noise(4096, 'x');
    CHECK(write(stranger, noise.data(), noise.size()) == ssize_t(noise.size()));
    std::string error_text;
    std::thread first([&] {
        const ProcessGroupTcp group(listeners.options(0));
        group.GetGroupRank(0);
    });
    try {
        const ProcessGroupTcp group(listeners.options(1));
    } catch (const Error &error) {
        error_text = error.what();
    }
    first.join();
    close(stranger);
    CHECK_EQ(error_text, std::string());
}

TEST(invalid_init_method_is_rejected_without_naming_the_token) {
    const Listeners listeners(2);
    GroupOptions options = listeners.options(0, "secret");
    const std::string good = options.init_method;
    for (const std::string &wrong : {good + ",127.0.0.1:1", std::string("tcp://x:secret@a:1,b:2"),
                                     std::string("shm://name")}) {
        options.init_method = wrong;
        try {
            const ProcessGroupTcp group(options);
            CHECK(false);
        } catch (const Error &error) {
            const std::string what = error.what();
            CHECK(what.find("init_method must be tcp://") == 0);
            CHECK(what.find("secret") == std::string::npos);
        }
    }
    for (const int fd : listeners.fds) {
        close(fd);
    }
}

TEST(invalid_token_is_rejected_and_the_listener_is_closed) {
    const Listeners listeners(2);
    for (size_t i = 0; i < 2; ++i) {
        RendezvousOptions ranks;
        ranks.listener = listeners.fds[i];
        ranks.token = std::string(i == 0 ? 0 : RendezvousOptions::kMaxToken + 1, 'a');
        ranks.addresses = {"127.0.0.1:1", "127.0.0.1:2"};
        CHECK_THROWS(connect_ranks(ranks), "the token must have 1 to 64 characters");
        CHECK_EQ(fcntl(listeners.fds[i], F_GETFD), -1);
    }
}
