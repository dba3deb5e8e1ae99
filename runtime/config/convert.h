// Config to and from JSON values.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"
#include "ebb/runtime/config/document.h"
#include "ebb/runtime/config/problems.h"
#include "ebb/runtime/config/reader.h"
#include "ebb/runtime/config/value.h"

namespace ebb::config {

// `keys`, if not null, receives how each key was taken.
absl::StatusOr<Config> FromDocument(Document document, const ReadOptions& options = {},
                                    std::vector<TakenKey>* keys = nullptr);

Json ToDocument(Config config);

// For a user: a line for each key of the text, with its value, its default and how it was taken.
// Then the log lines of the start of training. Errors are those of Config::FromJson.
absl::StatusOr<std::string> Explain(std::string_view text, const ReadOptions& options);

// Checks combinations of keys. Each single key has passed its own check.
void CheckTogether(const Config& config, Problems& problems);

// Config::ForWorld's work on a configuration that has passed the other checks.
void CompleteForWorld(int world, Config& config, Problems& problems);

}  // namespace ebb::config
