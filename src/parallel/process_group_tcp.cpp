// The TCP process group: parses its init_method.
#include "parallel/process_group_host.hpp"
#include "parallel/socket_transport.hpp"

#include <cstdlib>

namespace llaisys::parallel {

namespace {

// tcp://FD:TOKEN@HOST:PORT,HOST:PORT,..
RendezvousOptions parse(const GroupOptions &options) {
    const std::string &where = options.init_method;
    const char *const form = "init_method must be tcp://FD:TOKEN@HOST:PORT,.. with an address for "
                             "each rank, got ";
    const size_t at = where.find('@');
    require(where.rfind("tcp://", 0) == 0 && at != std::string::npos, form,
            at == std::string::npos ? where : where.substr(at)); // without the token
    RendezvousOptions result;
    char *end = nullptr;
    const long number = std::strtol(where.c_str() + 6, &end, 10);
    const size_t colon = size_t(end - where.c_str());
    require(colon > 6 && *end == ':' && number >= 0 && number < 1 << 30, form, where.substr(at));
    result.listener = int(number);
    result.token = where.substr(colon + 1, at - colon - 1);
    for (size_t first = at + 1; first <= where.size();) {
        const size_t comma = std::min(where.find(',', first), where.size());
        result.addresses.push_back(where.substr(first, comma - first));
        first = comma + 1;
    }
    require(result.addresses.size() == options.ranks.size(), form, where.substr(at), " for ",
            options.ranks.size(), " ranks");
    result.rank = group_rank_of(options, options.rank);
    result.timeout = options.timeout;
    return result;
}

} // namespace

ProcessGroupTcp::ProcessGroupTcp(const GroupOptions &options)
    : ProcessGroupHost(options, std::make_unique<SocketTransport>(parse(options))) {}

} // namespace llaisys::parallel
