#include "device/tuning_file.hpp"

#include <cstdint>
#include <cstdlib>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <unistd.h>
#include <utility>

namespace llaisys::device {

namespace {

constexpr size_t kMaxBytes = size_t(4) << 20; // a larger file is not ours

// Non-negative decimal number; -1 for anything else.
int number_of(const std::string &text) {
    if (text.empty() || text.size() > 6 ||
        text.find_first_not_of("0123456789") != std::string::npos) {
        return -1;
    }
    return std::atoi(text.c_str());
}

// Appends text with one call, so that lines of several processes do not mix.
bool append(const std::string &path, const std::string &text, int flags) {
    const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | flags, 0600);
    if (file < 0) {
        return false;
    }
    const bool is_written = ::write(file, text.data(), text.size()) == ssize_t(text.size());
    return ::close(file) == 0 && is_written;
}

} // namespace

TuningFile::TuningFile(std::string path, const std::string &identity)
    : path_(std::move(path)), header_("llaisys tuning 1: " + identity) {
    std::error_code error;
    if (path_.empty() || !std::filesystem::is_regular_file(path_, error) ||
        std::filesystem::file_size(path_, error) > kMaxBytes || error) {
        return;
    }
    std::ifstream file(path_);
    std::string line;
    is_valid_ = bool(std::getline(file, line)) && line == header_ && !file.eof();
    while (is_valid_ && std::getline(file, line) && !file.eof()) { // eof: the line is incomplete
        const size_t tab = line.find('\t');
        const int value = tab == std::string::npos ? -1 : number_of(line.substr(tab + 1));
        if (value >= 0) {
            values_[line.substr(0, tab)] = value;
        }
    }
}

int TuningFile::find(const std::string &key) const {
    const auto found = values_.find(key);
    return found != values_.end() ? found->second : -1;
}

void TuningFile::remember(const std::string &key, int value) {
    values_[key] = value;
    if (path_.empty()) {
        return;
    }
    std::error_code error;
    if (!is_valid_) { // new, or of another identity
        std::filesystem::create_directories(std::filesystem::path(path_).parent_path(), error);
        is_valid_ = append(path_, header_ + "\n", O_TRUNC);
        path_ = is_valid_ ? path_ : "";
    }
    if (is_valid_) {
        append(path_, key + "\t" + std::to_string(value) + "\n", O_APPEND);
    }
}

std::string TuningFile::path_of(const std::string &identity) {
    const auto variable = [](const char *value) { return std::string(value ? value : ""); };
    std::string directory = variable(std::getenv("LLAISYS_CACHE"));
    const std::string base = variable(std::getenv("XDG_CACHE_HOME"));
    const std::string home = variable(std::getenv("HOME"));
    if (directory.empty() && !base.empty()) {
        directory = base + "/llaisys";
    } else if (directory.empty() && !home.empty()) {
        directory = home + "/.cache/llaisys";
    }
    if (directory.empty()) {
        return "";
    }
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (const char c : identity) {
        hash = (hash ^ uint8_t(c)) * 1099511628211u;
    }
    return directory + "/tuning/" + std::to_string(hash) + ".txt";
}

} // namespace llaisys::device
