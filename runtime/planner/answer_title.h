// The title of answers: the model, the batch, the optimizer, and whose activations and kernels are
// planned.
#pragma once

#include <cstdint>
#include <string>

#include "ebb/runtime/planner/answer.h"

namespace ebb::planner {

std::string TitleOf(const Question& question);
std::string OptimizerName(const Config& config);  // as in "optimizer.type"

std::string Grouped(double number);              // 1234567 as "1,234,567"
std::string ParametersText(int64_t parameters);  // "39.98 M", "6.738 B"
// The end of a long name, which is that of a path and says what is counted.
std::string NameOf(const Model& model);
// "39.98 M of them train: LoRA of rank 16 on all-linear".
std::string TrainedText(const Model& model);

// Whether the answers have a column for tensor ranks, beside which two others are narrower.
bool ShowsTensor(const Question& question);

}  // namespace ebb::planner
