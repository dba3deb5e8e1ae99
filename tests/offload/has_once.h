// Matches a log that has the text exactly once.
#pragma once

#include <gmock/gmock.h>

#include <string>

namespace ebb::testing {

MATCHER_P(HasOnce, text, "") {
  const std::string all = arg;
  const size_t at = all.find(text);
  return at != std::string::npos && all.find(text, at + 1) == std::string::npos;
}

}  // namespace ebb::testing
