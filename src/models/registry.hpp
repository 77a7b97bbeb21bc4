// Registry of model types.
#pragma once

#include "models/model.hpp"

#include <memory>

namespace llaisys::models {

// Throws for an unknown type or invalid hyper-parameters. `meta` is the struct of the type and
// describes the unsharded model.
std::unique_ptr<Model> create_model(LlaisysModelType type, const void *meta,
                                    const ModelPlacement &placement);

} // namespace llaisys::models
