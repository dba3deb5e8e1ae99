// Config to JSON and back, before either is text.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

absl::StatusOr<Config> FromDocument(Json document, const ReadOptions& options = {});

Json ToDocument(Config config);

// What holds between keys, each of which is allowed by itself.
absl::Status CheckTogether(const Config& config);

}  // namespace ebb::config
