// Explains to a user how each key of a configuration file is taken.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "ebb/runtime/config/config.h"

namespace ebb::config {

// A line for each key of the text: its value, its default, how it was taken. Then the log lines of
// the start of training. Errors are those of Config::FromJson.
absl::StatusOr<std::string> Explain(std::string_view text, const ReadOptions& options);

}  // namespace ebb::config
