// Results of a search over kernels, remembered in a file of the cache directory. The identity names
// everything the results depend on (GPU, driver, libraries); a file with another identity is not
// read. A missing, unreadable or corrupt file, or a corrupt line, counts as nothing remembered:
// the search runs again. Errors are never reported.
#pragma once

#include <map>
#include <string>

namespace llaisys::device {

class TuningFile {
public:
    // Nothing is remembered with an empty path. Reads the file. identity: one line.
    TuningFile(std::string path, const std::string &identity);

    // -1: not remembered. key: without line breaks and tabs.
    int find(const std::string &key) const;
    // Appends to the file, which other processes may do at the same time. value: 0 or more.
    void remember(const std::string &key, int value);

    // File of this identity in the cache directory: `tuning` below $LLAISYS_CACHE, otherwise
    // $XDG_CACHE_HOME/llaisys or $HOME/.cache/llaisys. Empty without any of them.
    static std::string path_of(const std::string &identity);

private:
    std::string path_, header_;
    bool is_valid_ = false; // the file begins with the header
    std::map<std::string, int> values_;
};

} // namespace llaisys::device
