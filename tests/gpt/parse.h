// A command line of gpt, without the program's name.
#pragma once

#include <vector>

#include "command_line/options.h"

namespace ebb::gpt {

inline CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "gpt");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
}

}  // namespace ebb::gpt
