// Documents that are generated from the table of keys alone.
#pragma once

#include <string>

namespace ebb::config {

// docs/configuration.md.
std::string KeysAsMarkdown();

// A JSON Schema (draft 7) with which editors complete and check configuration files. It is a little
// stricter than the reader: it refuses values that DeepSpeed converts, such as "true" for true.
std::string KeysAsSchema();

}  // namespace ebb::config
