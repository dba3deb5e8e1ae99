// The table of keys as documents, each generated from it alone.
#pragma once

#include <string>

namespace ebb::config {

// docs/configuration.md.
std::string KeysAsMarkdown();

// A JSON Schema (draft 7) that editors complete and check configuration files with. It is a little
// stricter than the reader: values that DeepSpeed converts, such as "true" for true, do not pass.
std::string KeysAsSchema();

}  // namespace ebb::config
