// The options of ebb-plan about tensor ranks.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "ebb/runtime/planner/answer.h"
#include "ebb/runtime/planner/program/model_arguments.h"

namespace ebb::planner {

struct TensorArguments {
  std::string width;  // "4"; "auto": several; "": that of the configuration
  bool sequence_parallel = false;
};

struct Asked {
  bool with_all = false;     // the models of other widths, too
  bool is_compared = false;  // the number of ranks is searched
  bool has_file = false;     // that sets the sizes of gathers
};
// The widths that are searched, with the model of each, and the configuration of the first.
absl::Status AddWidths(const TensorArguments& given, const ModelArguments& of_model,
                       const Asked& asked_for, Question& question);

// Whether the tensor ranks can share a sequence, if they do.
absl::Status CheckRows(const TensorArguments& given, const Question& question);

// The data ranks for which a batch of so many sequences is rounded: those of the first width that
// gives each one.
int PartsOf(const Question& question, double sequences);

// All widths train with the same sequences: `whole` of a step, or those of data ranks alone (0).
absl::Status GiveOneBatch(int64_t whole, Question& question);

// `arguments` must outlive the parsing.
void AddTensorOptions(CLI::App& app, TensorArguments& arguments);

}  // namespace ebb::planner
