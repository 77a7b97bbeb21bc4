// Minimal test harness. A test file includes this and defines
//
//     TEST(name_of_the_behaviour) { CHECK(x > 0); CHECK_EQ(x, 3); CHECK_THROWS(f(), "in"); }
// The program runs every test, or those whose name, "file/behaviour", contains a program argument. A
// failed check is reported with file and line and the test continues; an exception ends the test.
#pragma once

#include <cstdio>
#include <cstring>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Test {
    std::string name; // "test_tensor/name_of_the_behaviour"
    void (*body)();
};

inline std::vector<Test> &tests() {
    static std::vector<Test> all;
    return all;
}

inline int &failures() {
    static int count = 0;
    return count;
}

struct Registration {
    Registration(const std::string &path, const char *name, void (*body)()) {
        const size_t begin = path.rfind('/') + 1; // 0 without a directory
        tests().push_back({path.substr(begin, path.rfind('.') - begin) + "/" + name, body});
    }
};

inline void report(const char *file, int line, const std::string &what) {
    if (++failures() <= 50) { // a wrong kernel fails for every element
        std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
    }
}

template <typename A, typename B>
void equal(const char *file, int line, const char *text, const A &a, const B &b) {
    if (!(a == b)) {
        std::ostringstream out;
        out << text << ": got " << a << ", expected " << b;
        report(file, line, out.str());
    }
}

// body must throw a std::exception whose text contains every one of `parts`.
template <typename Body>
void throws(const char *file, int line, const char *text, std::initializer_list<const char *> parts,
            const Body &body) {
    try {
        body();
    } catch (const std::exception &error) {
        for (const char *part : parts) {
            if (std::strstr(error.what(), part) == nullptr) {
                report(file, line,
                       std::string(text) + ": '" + part + "' is not in the error text '" +
                           error.what() + "'");
            }
        }
        return;
    }
    report(file, line, std::string(text) + ": nothing was thrown");
}

inline bool is_selected(const std::string &name, int argc, char **argv) {
    for (int i = 1; i < argc; ++i) {
        if (name.find(argv[i]) != std::string::npos) {
            return true;
        }
    }
    return argc <= 1;
}

inline int run(int argc, char **argv) {
    int n_run = 0;
    int n_failed = 0;
    for (const Test &test : tests()) {
        if (!is_selected(test.name, argc, argv)) {
            continue;
        }
        const int before = failures();
        try {
            test.body();
        } catch (const std::exception &error) {
            report(test.name.c_str(), 0, std::string("unexpected exception: ") + error.what());
        }
        ++n_run;
        n_failed += failures() != before;
        std::printf("%s %s\n", failures() == before ? "ok    " : "FAILED", test.name.c_str());
    }
    std::printf("%d tests, %d failed\n", n_run, n_failed);
    return n_failed == 0 && n_run > 0 ? 0 : 1;
}

} // namespace check

#define TEST(name)                                                                                 \
    static void test_##name();                                                                     \
    static const check::Registration registration_##name(__FILE__, #name, test_##name);            \
    static void test_##name()
#define CHECK(condition)                                                                           \
    ((condition) ? (void)0 : check::report(__FILE__, __LINE__, "failed: " #condition))
#define CHECK_EQ(got, expected)                                                                    \
    check::equal(__FILE__, __LINE__, #got " == " #expected, (got), (expected))
// CHECK_THROWS(expression, "part of the text", ...)
#define CHECK_THROWS(expression, ...)                                                              \
    check::throws(__FILE__, __LINE__, #expression, {__VA_ARGS__}, [&] { (void)(expression); })
