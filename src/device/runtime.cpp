#include "device/runtime.hpp"

namespace llaisys::device {

namespace {

const Runtime *substitutes[LLAISYS_DEVICE_TYPE_COUNT] = {};

bool is_device(DeviceType type) { return type >= 0 && type < LLAISYS_DEVICE_TYPE_COUNT; }

// Null when this build has none.
const Runtime *find(DeviceType type) {
    if (!is_device(type) || substitutes[type] != nullptr) {
        return is_device(type) ? substitutes[type] : nullptr;
    }
    switch (type) {
    case LLAISYS_DEVICE_CPU:
        return &cpu_runtime();
#if defined(LLAISYS_HAVE_CUDA)
    case LLAISYS_DEVICE_NVIDIA:
        return &cuda_runtime();
#endif
    default:
        return nullptr;
    }
}

} // namespace

bool has_runtime(DeviceType type) { return find(type) != nullptr; }

void use_runtime(DeviceType type, const Runtime *runtime) { substitutes[type] = runtime; }

const Runtime &runtime_of(DeviceType type) {
    require(is_device(type), "device must be cpu (0) or nvidia (1), got ", int(type));
    const Runtime *runtime = find(type);
    if (runtime == nullptr) {
        fail(LLAISYS_ERROR_UNSUPPORTED, "device nvidia (1) is not part of this build");
    }
    return *runtime;
}

Stream::Stream(DeviceType type, int device_id, int n_threads)
    : runtime_(&runtime_of(type)), device_id_(device_id), native_(nullptr) {
    const int count = runtime_->device_count();
    require(count > 0, "this machine has no device ", runtime_->name, " that can be used");
    require(device_id >= 0 && device_id < count, "device_id must be in [0, ", count, "), got ",
            device_id);
    native_ = runtime_->create_stream(device_id, n_threads);
}

Stream::~Stream() { runtime_->destroy_stream(native_); }

} // namespace llaisys::device
