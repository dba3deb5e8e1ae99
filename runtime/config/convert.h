// Config to JSON and back, before either is text.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/document.h"
#include "ebb/runtime/config/problems.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

// `keys`, if not null, becomes how each key was taken.
absl::StatusOr<Config> FromDocument(Document document, const ReadOptions& options = {},
                                    std::vector<TakenKey>* keys = nullptr);

Json ToDocument(Config config);

// What holds between keys, each of which is allowed by itself.
void CheckTogether(const Config& config, Problems& problems);

}  // namespace ebb::config
