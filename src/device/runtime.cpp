#include "device/runtime.hpp"

namespace llaisys::device {

bool has_runtime(DeviceType type) { return type == LLAISYS_DEVICE_CPU; }

const Runtime &runtime_of(DeviceType type) {
    require(type >= 0 && type < LLAISYS_DEVICE_TYPE_COUNT,
            "device must be cpu (0) or nvidia (1), got ", int(type));
    if (!has_runtime(type)) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "device nvidia (1) is not part of this build");
    }
    return cpu_runtime();
}

Stream::Stream(DeviceType type, int device_id, int n_threads)
    : runtime_(&runtime_of(type)), device_id_(device_id), native_(nullptr) {
    const int count = runtime_->device_count();
    require(device_id >= 0 && device_id < count, "device_id must be in [0, ", count, "), got ",
            device_id);
    native_ = runtime_->create_stream(device_id, n_threads);
}

Stream::~Stream() { runtime_->destroy_stream(native_); }

} // namespace llaisys::device
