// A command line of gpt, without the program's name, and its configuration.
#pragma once

#include <string>
#include <vector>

#include "command_line/configuration.h"
#include "command_line/options.h"
#include "gtest/gtest.h"

namespace ebb::gpt {

inline CommandLine Parse(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "gpt");
  return ParseCommandLine(static_cast<int>(arguments.size()), arguments.data());
}

inline Config Resolved(const std::vector<const char*>& arguments) {
  const auto config = ResolveConfig(*Parse(arguments).options);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? *config : Config();
}

// The message of the error; empty: there is none.
inline std::string Refusal(const std::vector<const char*>& arguments) {
  return std::string(ResolveConfig(*Parse(arguments).options).status().message());
}

}  // namespace ebb::gpt
