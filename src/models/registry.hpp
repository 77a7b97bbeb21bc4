// The model types that this library can run.
#pragma once

#include "models/model.hpp"

#include <memory>

namespace llaisys::models {

// Throws for an unknown type or wrong hyper-parameters. `meta` is the type's own struct and speaks
// of the whole model, of which the site's rank holds a part.
std::unique_ptr<Model> create_model(LlaisysModelType type, const void *meta, const ModelSite &site);

} // namespace llaisys::models
