// The named tensors of a checkpoint or model: a checkpoint of Ebb, or safetensors files (one, or
// several with an index). Values are read as fp32, any interval of a tensor at a time, so memory
// does not depend on the model.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "ebb/runtime/base/dtype.h"
#include "ebb/runtime/engine/training_state.h"
#include "ebb/sharding/model.h"

namespace ebb {

struct TensorInfo {
  std::string name = {};
  std::string state = {};  // of the optimizer ("exp_avg"); empty: the parameter's value
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape = {};
  bool trainable = true;

  int64_t elements() const { return Elements(shape); }
};

// A tensor of the files that the source does not have.
struct LeftOutTensor {
  std::string name;
  std::string why;  // the text after "is "
};

// The checkpoint or model of the tensors.
struct SourceDescription {
  std::string kind = {};          // in words
  std::string path = {};          // as it was found
  TrainingState state = {};       // zeros for values that the files lack
  std::string model_config = {};  // of a config.json beside the tensors; empty: there is none
  std::vector<LeftOutTensor> left_out = {};
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;

  const SourceDescription& description() const { return description_; }
  // In the order in which reading them is fastest.
  const std::vector<TensorInfo>& tensors() const { return tensors_; }
  // Elements [begin, begin + values.size()) of tensors()[tensor], in row-major order. From one
  // thread at a time.
  virtual absl::Status Read(size_t tensor, int64_t begin, std::span<float> values) = 0;

 protected:
  SourceDescription description_;
  std::vector<TensorInfo> tensors_;
};

// Opens `path`: a checkpoint or a folder of checkpoints (the newest complete one), or a file or
// folder of model_files.h. Headers are read and checked. For torch's files the error names
// ebb-checkpoint, which imports them.
absl::StatusOr<std::unique_ptr<TensorSource>> OpenTensorSource(const std::string& path);
// Whether that would be a checkpoint of Ebb.
bool HasCheckpoints(const std::string& path);

// Copies all tensors of a source, one after the other, in pieces of 64 MiB of values, so that a
// matrix that is transposed is read a few times at most. Memory does not depend on the model.
using TensorSink = absl::FunctionRef<absl::Status(size_t tensor, std::span<const float> values)>;
absl::Status ForEachPiece(TensorSource& source, TensorSink sink);

// How two tensors of one shape differ. `progress` gets the elements since its last call.
struct TensorDifference {
  int64_t elements = 0;  // that differ in bits
  double most = 0;       // the largest difference of two numbers
};
absl::StatusOr<TensorDifference> Compare(
    TensorSource& a, size_t of_a, TensorSource& b, size_t of_b,
    absl::FunctionRef<void(int64_t elements)> progress = [](int64_t) {});

// "[3, 4]"
std::string ShapeText(const std::vector<int64_t>& shape);
// Why the tensor is not the parameter's value: "'w' has the shape [3] there and [4] in the model";
// empty: it is.
std::string Misfit(const ParameterSpec& parameter, const std::vector<int64_t>& shape, DType dtype);
// The first five of the differences, and how many more there are.
std::string DifferencesText(const std::vector<std::string>& differences);
// "'w'", or "exp_avg of 'w'"
std::string Described(const TensorInfo& tensor);

}  // namespace ebb
