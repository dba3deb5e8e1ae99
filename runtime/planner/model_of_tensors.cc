#include "ebb/runtime/planner/model_of_tensors.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::planner {
namespace {

constexpr int64_t kElementsMax = int64_t{1} << 53;

bool IsNumber(absl::string_view part) {
  return !part.empty() && part.size() <= 6 && std::all_of(part.begin(), part.end(), [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c));
  });
}

// The words up to the first number and that number: "layers", 12. Nothing: the tensor is in no block.
struct BlockName {
  std::string list;
  int64_t number = -1;
};
BlockName BlockOf(const std::string& tensor) {
  const std::vector<std::string> parts = absl::StrSplit(tensor, '.');
  for (size_t i = 1; i < parts.size(); ++i) {
    if (IsNumber(parts[i])) return {.list = parts[i - 1], .number = std::stoll(parts[i])};
  }
  return {};
}

// Of more than 2^53: nothing.
int64_t ElementsOf(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t side : shape) {
    if (side < 1 || elements > kElementsMax / side) return -1;
    elements *= side;
  }
  return elements;
}

void AddVisit(Model& model, bool is_block) {
  ModelVisit visit{.unit = static_cast<int>(model.units.size()) - 1, .is_block = is_block};
  for (const ModelTensor& tensor : model.units.back().tensors) {
    if (tensor.shape.size() < 2) continue;
    const bool is_table = tensor.shape[0] == model.vocabulary && visit.unit == 0;
    if (is_table) continue;
    visit.products += static_cast<double>(ElementsOf(tensor.shape));
    if (is_block) visit.kept += tensor.shape[0];
  }
  if (is_block) visit.scratch = 2 * visit.kept;
  model.visits.push_back(visit);
}

}  // namespace

absl::StatusOr<Model> ModelOfTensors(std::vector<ModelTensor> tensors, std::string name) {
  Model model{.name = std::move(name)};
  ModelUnit before{.name = "before"}, after{.name = "after"};
  std::map<int64_t, ModelUnit> blocks;  // of the list that the first numbered tensor is of
  std::string list;
  std::map<int64_t, int64_t> widths;  // how often a vector has so many elements
  int64_t elements = 0;
  for (ModelTensor& tensor : tensors) {
    const int64_t count = ElementsOf(tensor.shape);
    if (count < 0 || elements > kElementsMax - count)
      return absl::InvalidArgumentError(absl::StrCat("tensor ", config::Quoted(tensor.name),
                                                     ": more than 2^53 elements, or none"));
    elements += count;
    if (tensor.shape.size() == 1) ++widths[tensor.shape[0]];
    const BlockName block = BlockOf(tensor.name);
    if (block.number >= 0 && list.empty()) list = block.list;
    if (block.number >= 0 && block.list == list) {
      blocks[block.number].tensors.push_back(std::move(tensor));
      continue;
    }
    const bool is_head = tensor.name.find("head") != std::string::npos ||
                         tensor.name.find("norm") != std::string::npos ||
                         tensor.name.find("ln_f") != std::string::npos;
    (is_head ? after : before).tensors.push_back(std::move(tensor));
  }
  if (elements == 0) return absl::InvalidArgumentError("there is no tensor");
  const auto most =
      std::max_element(widths.begin(), widths.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != widths.end()) model.width = most->first;
  for (const ModelTensor& tensor : before.tensors) {
    if (tensor.shape.size() == 2) model.vocabulary = std::max(model.vocabulary, tensor.shape[0]);
  }
  const auto add = [&](ModelUnit unit, bool is_block) {
    if (unit.tensors.empty()) return;
    model.units.push_back(std::move(unit));
    AddVisit(model, is_block);
  };
  add(std::move(before), false);
  for (auto& [number, unit] : blocks) {
    unit.name = absl::StrCat(list, ".", number);
    add(std::move(unit), true);
  }
  add(std::move(after), false);
  return model;
}

absl::StatusOr<Model> ModelOfSafetensors(std::span<const std::string> paths) {
  std::vector<ModelTensor> tensors;
  std::set<std::string> names;
  for (const std::string& path : paths) {
    const FileHandle file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!file.is_open())
      return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
    EBB_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(file.get(), path));
    for (StoredTensor& tensor : header.tensors) {
      if (!names.insert(tensor.name).second)
        return absl::InvalidArgumentError(absl::StrCat(
            path, ": tensor ", config::Quoted(tensor.name), " is in two of these files"));
      if (std::find(tensor.shape.begin(), tensor.shape.end(), 0) != tensor.shape.end()) continue;
      tensors.push_back({.name = std::move(tensor.name), .shape = std::move(tensor.shape)});
    }
  }
  // In the order of names files are cut anywhere.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const ModelTensor& a, const ModelTensor& b) { return a.name < b.name; });
  absl::StatusOr<Model> model =
      ModelOfTensors(std::move(tensors), paths.empty() ? "" : paths.front());
  if (!model.ok() && !paths.empty())
    return absl::InvalidArgumentError(absl::StrCat(paths.front(), ": ", model.status().message()));
  return model;
}

}  // namespace ebb::planner
