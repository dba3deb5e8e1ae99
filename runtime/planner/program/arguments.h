// The command line of ebb-plan.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "ebb/runtime/planner/offers.h"

namespace ebb::planner {

struct Arguments {
  Question question = {};
  // One configuration, from a file or from flags; none: the fastest of all is searched.
  std::optional<Choice> asked = {};
  std::optional<Quantity> largest = {};
  std::vector<Offer> offers = {};  // machines to compare; none: only the question's
  bool all = false, json = false, bound = false;
  std::vector<std::string> warnings = {};  // a line each
  struct Files {
    std::string write = "", trace = "", svg = "";  // "": not written
  } files = {};
};

// Either arguments, or a text to print with an exit code: 0 after --help and --list, 2 for a wrong
// command line.
struct CommandLine {
  std::optional<Arguments> arguments = {};
  std::string text = "";
  int exit_code = 0;
};
CommandLine ParseCommandLine(int argc, char** argv);

}  // namespace ebb::planner
