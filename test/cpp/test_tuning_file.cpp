// TuningFile: results survive the process; damaged and foreign files count as empty.
#include "check.hpp"
#include "device/tuning_file.hpp"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

using llaisys::device::TuningFile;
namespace fs = std::filesystem;

namespace {

struct Directory {
    fs::path root;

    Directory() {
        std::string name = (fs::temp_directory_path() / "llaisys-tuning-XXXXXX").string();
        root = mkdtemp(name.data());
    }
    ~Directory() { fs::remove_all(root); }
    std::string path() const { return (root / "a/b.txt").string(); }
    void write(const std::string &text) const {
        std::ofstream(path(), std::ios::trunc | std::ios::binary) << text;
    }
    std::string read() const {
        std::stringstream text;
        text << std::ifstream(path()).rdbuf();
        return text.str();
    }
};

} // namespace

TEST(results_survive) {
    const Directory directory;
    TuningFile first(directory.path(), "gpu 1");
    CHECK_EQ(first.find("256 x 512"), -1);
    first.remember("256 x 512", 3);
    first.remember("256 x 1024", 0);
    first.remember("256 x 512", 7); // a later line wins
    CHECK_EQ(first.find("256 x 512"), 7);
    const TuningFile second(directory.path(), "gpu 1");
    CHECK_EQ(second.find("256 x 512"), 7);
    CHECK_EQ(second.find("256 x 1024"), 0);
    CHECK_EQ(second.find("256"), -1);
}

TEST(file_of_another_identity_is_replaced) {
    const Directory directory;
    TuningFile(directory.path(), "gpu 1").remember("256 x 512", 3);
    TuningFile other(directory.path(), "gpu 2");
    CHECK_EQ(other.find("256 x 512"), -1);
    other.remember("key", 1);
    CHECK_EQ(TuningFile(directory.path(), "gpu 1").find("256 x 512"), -1);
    CHECK_EQ(TuningFile(directory.path(), "gpu 2").find("key"), 1);
}

TEST(file_of_another_version_is_replaced) {
    const Directory directory;
    TuningFile(directory.path(), "gpu 1").remember("256 x 512", 3);
    const std::string all = directory.read();
    CHECK_EQ(all.rfind("llaisys tuning 1: gpu 1\n", 0), size_t(0));
    directory.write("llaisys tuning 0" + all.substr(all.find(':')));
    TuningFile file(directory.path(), "gpu 1");
    CHECK_EQ(file.find("256 x 512"), -1);
    file.remember("key", 1);
    CHECK_EQ(directory.read(), "llaisys tuning 1: gpu 1\nkey\t1\n");
}

TEST(damage_is_ignored) {
    const Directory directory;
    TuningFile(directory.path(), "gpu 1").remember("good", 2);
    const std::string all = directory.read();
    const std::string header = all.substr(0, all.find('\n') + 1);
    directory.write(header + "no number\t\nnegative\t-1\nlong\t12345678901\nword\tx1\n"
                             "no tab 4\n\n\t\ngood\t5\ncut\t6");
    const TuningFile damaged(directory.path(), "gpu 1");
    for (const char *key : {"no number", "negative", "long", "word", "no tab 4", "cut"}) {
        CHECK_EQ(damaged.find(key), -1);
    }
    CHECK_EQ(damaged.find("good"), 5);
    const std::string binary("\x7f\0\xff\n\xfe\t1\n", 8);
    for (const std::string &text : {std::string(), header.substr(0, header.size() - 1), binary}) {
        directory.write(text);
        TuningFile file(directory.path(), "gpu 1");
        CHECK_EQ(file.find("good"), -1);
        file.remember("good", 1); // starts a new file
        CHECK_EQ(TuningFile(directory.path(), "gpu 1").find("good"), 1);
    }
}

TEST(search_works_without_a_file) {
    const Directory directory;
    std::ofstream(directory.root / "file") << "text";
    for (const std::string &path :
         {std::string(), (directory.root / "file/below/it").string(), directory.root.string()}) {
        TuningFile file(path, "gpu 1");
        file.remember("key", 4);
        CHECK_EQ(file.find("key"), 4);
        CHECK_EQ(TuningFile(path, "gpu 1").find("key"), -1);
    }
}

TEST(files_lie_in_the_cache_directory) {
    const auto begins = [](const char *with) {
        return TuningFile::path_of("gpu 1").rfind(with, 0) == 0;
    };
    ::setenv("HOME", "/home/x", 1);
    ::unsetenv("XDG_CACHE_HOME");
    ::unsetenv("LLAISYS_CACHE");
    CHECK(begins("/home/x/.cache/llaisys/tuning/"));
    ::setenv("XDG_CACHE_HOME", "/xdg", 1);
    CHECK(begins("/xdg/llaisys/tuning/"));
    ::setenv("LLAISYS_CACHE", "/own", 1);
    CHECK(begins("/own/tuning/"));
    CHECK(TuningFile::path_of("gpu 1") != TuningFile::path_of("gpu 2"));
}
