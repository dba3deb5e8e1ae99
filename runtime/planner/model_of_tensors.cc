#include "ebb/runtime/planner/model_of_tensors.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <regex>
#include <set>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "ebb/offload/file_handle.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/status_macros.h"
#include "ebb/runtime/checkpoint/file_access.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/safetensors.h"
#include "nlohmann/json.hpp"

namespace ebb::planner {
namespace {

constexpr int64_t kElementsMax = int64_t{1} << 53;

bool IsNumber(absl::string_view part) {
  return !part.empty() && part.size() <= 6 && std::all_of(part.begin(), part.end(), [](char c) {
    return absl::ascii_isdigit(static_cast<unsigned char>(c));
  });
}

// The name up to its first number, and that number: "layers", 12. Number -1: the tensor is in no
// block.
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

// -1: a side below 1, or more than 2^53 elements.
int64_t ElementsOf(const std::vector<int64_t>& shape) {
  int64_t elements = 1;
  for (const int64_t side : shape) {
    if (side < 1 || elements > kElementsMax / side) return -1;
    elements *= side;
  }
  return elements;
}

// Some programs store masks of attention and frequencies of rotary positions. No program trains
// them.
bool IsBuffer(const ModelTensor& tensor) {
  const std::vector<int64_t>& shape = tensor.shape;
  return tensor.name.ends_with("inv_freq") || tensor.name.ends_with("masked_bias") ||
         (shape.size() == 4 && shape[0] == 1 && shape[1] == 1 && shape[2] == shape[3]);
}

// Integers and 8-bit numbers are a quantised base: frozen bytes. Doubles get the compute dtype.
ModelTensor TensorOf(StoredTensor tensor) {
  ModelTensor made{.name = std::move(tensor.name),
                   .shape = std::move(tensor.shape),
                   .stored = DTypeOfSafetensors(tensor.dtype)};
  if (made.stored || tensor.dtype == "F64") return made;
  made.stored = DType::kInt8;
  const int64_t size = (tensor.end - tensor.begin) / Elements(made.shape);
  if (size > 1) made.shape.push_back(size);
  return made;
}

bool IsBytes(const ModelTensor& tensor) {
  return tensor.stored == DType::kInt8;
}
bool IsMatrix(const ModelTensor& tensor) {
  return tensor.shape.size() >= 2;
}

// Elements of the matrix that bytes stand for.
int64_t ElementsOfBytes(const ModelTensor& tensor) {
  if (tensor.parameters > 0) return tensor.parameters;
  const bool has_two = tensor.shape.size() == 2 && tensor.shape[1] == 1;
  return ElementsOf(tensor.shape) * (has_two ? 2 : 1);
}

// The part of an adapter's name before ".lora_B", without what PEFT puts before names. "": it is no
// such adapter.
std::string BaseOfAdapter(const std::string& name) {
  constexpr std::string_view kPeft = "base_model.model.";
  const size_t end = name.find(".lora_B");
  if (end == std::string::npos) return "";
  return name.substr(name.starts_with(kPeft) ? kPeft.size() : 0,
                     end - (name.starts_with(kPeft) ? kPeft.size() : 0));
}

// A table before the blocks is looked up, without a product. If it is also the head, its second
// visit is a product. The output of an adapter's second matrix is added to that of its base, so
// only one of the two is kept: the adapter's, if bytes are the base and their output is not known.
void AddVisit(Model& model, bool is_block, bool is_table) {
  ModelVisit visit{.unit = static_cast<int>(model.units.size()) - 1, .is_block = is_block};
  const std::vector<ModelTensor>& tensors = model.units.back().tensors;
  const auto has_own_output = [](const ModelTensor& t) { return !IsBytes(t) || t.rows > 0; };
  const auto base_has_output = [&](const std::string& base) {
    return std::any_of(tensors.begin(), tensors.end(), [&](const ModelTensor& of) {
      const size_t at = of.name.find(base + ".");
      return IsMatrix(of) && has_own_output(of) && at != std::string::npos &&
             (at == 0 || of.name[at - 1] == '.') && !absl::StrContains(of.name, ".lora_");
    });
  };
  for (const ModelTensor& tensor : tensors) {
    if (!IsMatrix(tensor) || is_table) continue;
    const int64_t elements = IsBytes(tensor) ? ElementsOfBytes(tensor) : ElementsOf(tensor.shape);
    visit.products += static_cast<double>(elements);
    if (IsBytes(tensor) || !tensor.trainable)
      visit.frozen_products += static_cast<double>(elements);
    if (IsBytes(tensor)) {
      visit.dequantized += elements;
      visit.dequantized_most = std::max(visit.dequantized_most, elements);
    }
    if (!is_block || !has_own_output(tensor)) continue;
    const std::string base = BaseOfAdapter(tensor.name);
    if (base.empty() || !base_has_output(base))
      visit.kept += tensor.rows > 0 ? tensor.rows : tensor.shape[0];
  }
  if (is_block) visit.scratch = 2 * visit.kept;
  model.visits.push_back(visit);
}

// The words of ebb.write_shapes about tensors. Other programs write no such keys.
struct WrittenShapes {
  std::set<std::string> frozen;
  std::map<std::string, std::vector<int64_t>> shapes;
};
absl::Status Read(const SafetensorsHeader& header, const std::string& path, WrittenShapes& to) {
  const auto wrong = [&](const char* key) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": the metadata's \"", key, "\" is not what ebb.write_shapes writes"));
  };
  using Json = nlohmann::json;
  if (const auto at = header.metadata.find(kFrozenKey); at != header.metadata.end()) {
    const Json names = Json::parse(at->second, nullptr, /*allow_exceptions=*/false);
    if (!names.is_array()) return wrong(kFrozenKey);
    for (const Json& name : names) {
      if (!name.is_string()) return wrong(kFrozenKey);
      to.frozen.insert(name.get<std::string>());
    }
  }
  if (const auto at = header.metadata.find(kShapesKey); at != header.metadata.end()) {
    const Json shapes = Json::parse(at->second, nullptr, /*allow_exceptions=*/false);
    if (!shapes.is_object()) return wrong(kShapesKey);
    for (const auto& [name, sides] : shapes.items()) {
      if (!sides.is_array() || sides.empty()) return wrong(kShapesKey);
      for (const Json& side : sides) {
        if (!side.is_number_integer() || side.get<int64_t>() < 1) return wrong(kShapesKey);
        to.shapes[name].push_back(side.get<int64_t>());
      }
      if (ElementsOf(to.shapes[name]) < 0) return wrong(kShapesKey);
    }
  }
  return absl::OkStatus();
}

// Factors and tables of a quantised base, which bitsandbytes stores beside its bytes.
bool IsOfQuantizer(const std::string& name) {
  for (const char* part : {".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map",
                           ".quant_state.", ".SCB", ".weight_format"}) {
    if (absl::StrContains(name, part)) return true;
  }
  return false;
}

// Freezes what does not train, and says what does.
absl::StatusOr<std::string> Freeze(const WrittenShapes& written, const std::string& trainable,
                                   std::vector<ModelTensor>& tensors) {
  constexpr char kAdapter[] = "lora_";
  std::function<bool(const std::string&)> trains;
  std::string says;
  std::regex expression;
  if (!trainable.empty()) {
    try {
      expression = std::regex(trainable, std::regex::ECMAScript | std::regex::optimize);
    } catch (const std::regex_error& error) {
      return absl::InvalidArgumentError(
          absl::StrCat("--trainable ", config::Quoted(trainable), ": ", error.what()));
    }
    trains = [&](const std::string& name) { return std::regex_search(name, expression); };
    says = absl::StrCat("names with ", config::Quoted(trainable));
  } else if (!written.frozen.empty()) {
    trains = [&](const std::string& name) { return !written.frozen.contains(name); };
    says = "what ebb.write_shapes found trainable";
  } else if (std::any_of(tensors.begin(), tensors.end(), [&](const ModelTensor& tensor) {
               return absl::StrContains(tensor.name, kAdapter);
             })) {
    trains = [&](const std::string& name) { return absl::StrContains(name, kAdapter); };
    says = "names with \"lora_\"; --trainable takes others";
  }
  bool any = false;
  for (ModelTensor& tensor : tensors) {
    tensor.trainable = !IsOfQuantizer(tensor.name) && (!trains || trains(tensor.name));
    any = any || (tensor.trainable && !IsBytes(tensor));
  }
  if (!any && !trainable.empty())
    return absl::InvalidArgumentError(
        absl::StrCat("--trainable ", config::Quoted(trainable),
                     ": it is found in no name of a tensor that could train"));
  return says;
}

// The files themselves, where some are the index of a model in several files.
absl::StatusOr<std::vector<std::string>> WithoutIndexes(std::span<const std::string> paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!path.ends_with(".index.json")) {
      files.push_back(path);
      continue;
    }
    EBB_ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(TargetOf(path), kIndexBytesMax));
    EBB_ASSIGN_OR_RETURN(const auto file_of_tensor, ParseModelIndex(text, path));
    std::set<std::string> of_index;
    for (const auto& [tensor, file] : file_of_tensor)
      of_index.insert(std::filesystem::path(path).replace_filename(file));
    files.insert(files.end(), of_index.begin(), of_index.end());
  }
  return files;
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
    if (IsBuffer(tensor)) continue;
    if (absl::StrContains(tensor.name, ".experts."))
      return absl::UnimplementedError(
          absl::StrCat("tensor ", config::Quoted(tensor.name),
                       " belongs to an expert, but the files do not say how many experts a token "
                       "goes through: give the model's config.json to --config-json"));
    const int64_t count = ElementsOf(tensor.shape);
    if (count < 0 || elements > kElementsMax - count)
      return absl::InvalidArgumentError(absl::StrCat("tensor ", config::Quoted(tensor.name),
                                                     " has more than 2^53 elements, or none"));
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
  if (elements == 0) return absl::InvalidArgumentError("the files have no tensors");
  const auto most =
      std::max_element(widths.begin(), widths.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  if (most != widths.end()) model.width = most->first;
  for (const ModelTensor& tensor : before.tensors) {
    if (tensor.shape.size() == 2 && !IsBytes(tensor))
      model.vocabulary = std::max(model.vocabulary, tensor.shape[0]);
  }
  const auto add = [&](ModelUnit unit, bool is_block, bool is_table = false) {
    if (unit.tensors.empty()) return;
    model.units.push_back(std::move(unit));
    AddVisit(model, is_block, is_table);
  };
  const bool has_tables = !before.tensors.empty() && !blocks.empty();
  const bool has_head = std::any_of(after.tensors.begin(), after.tensors.end(),
                                    [&](const ModelTensor& t) { return t.shape.size() > 1; });
  add(std::move(before), false, has_tables);
  for (auto& [number, unit] : blocks) {
    unit.name = absl::StrCat(list, ".", number);
    add(std::move(unit), true);
  }
  add(std::move(after), false);
  if (std::ssize(model.units) > kUnitsMax)
    return absl::InvalidArgumentError(absl::StrCat("the model has ", model.units.size(),
                                                   " units; ebb-plan takes at most ", kUnitsMax));
  if (has_tables && !has_head)
    model.visits.push_back(
        {.unit = 0,
         .products = static_cast<double>(model.vocabulary) * static_cast<double>(model.width)});
  return model;
}

absl::StatusOr<Model> ModelOfSafetensors(std::span<const std::string> paths,
                                         const std::string& trainable) {
  std::vector<ModelTensor> tensors;
  WrittenShapes written;
  std::set<std::string> names;
  std::map<std::string, int64_t> stored_bytes;
  EBB_ASSIGN_OR_RETURN(const std::vector<std::string> files, WithoutIndexes(paths));
  for (const std::string& path : files) {
    EBB_ASSIGN_OR_RETURN(const FileHandle file, OpenToRead(TargetOf(path)));
    EBB_ASSIGN_OR_RETURN(SafetensorsHeader header, ReadSafetensorsHeader(file.get(), path));
    EBB_RETURN_IF_ERROR(Read(header, path, written));
    for (StoredTensor& tensor : header.tensors) {
      if (!names.insert(tensor.name).second)
        return absl::InvalidArgumentError(absl::StrCat(
            path, ": tensor ", config::Quoted(tensor.name), " is in two of these files"));
      if (tensor.bytes() == 0) continue;
      stored_bytes[tensor.dtype] += tensor.bytes();
      tensors.push_back(TensorOf(std::move(tensor)));
    }
  }
  for (ModelTensor& tensor : tensors) {
    const auto shape = written.shapes.find(tensor.name);
    if (shape == written.shapes.end() || !IsBytes(tensor)) continue;
    tensor.parameters = ElementsOf(shape->second);
    tensor.rows = shape->second[0];
  }
  EBB_ASSIGN_OR_RETURN(const std::string says, Freeze(written, trainable, tensors));
  // In the order of names, because a model's files may be cut anywhere.
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const ModelTensor& a, const ModelTensor& b) { return a.name < b.name; });
  absl::StatusOr<Model> model =
      ModelOfTensors(std::move(tensors), paths.empty() ? "" : paths.front());
  if (!model.ok() && !paths.empty())
    return absl::Status(model.status().code(),
                        absl::StrCat(paths.front(), ": ", model.status().message()));
  if (model.ok()) {
    model->stored_bytes = std::move(stored_bytes);
    model->trains = says;
  }
  return model;
}

}  // namespace ebb::planner
