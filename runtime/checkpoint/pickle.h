// Python's pickles, as values. Nothing of a pickle is executed: a global is a name, and a call is the name of what would be
// called, beside its arguments. So is an object.
//
//   torch.save({"param": tensor})     {"param": torch._utils._rebuild_tensor_v2(persistent("storage", ...), 0, (3, 4), (4, 1), ...)}
//
// A pickle may come from anywhere. Those opcodes are known that torch.save and plain data need; any other is an error
// that names it. Values may refer to one another in circles, so a walk through all of them needs a limit of its own.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace ebb {

// What a pickle may have: 88 MiB of values at the most.
inline constexpr int64_t kPickleBytesMax = int64_t{16} << 20, kPickleValuesMax = int64_t{1} << 20;

struct PickleValue {
  enum class Kind : uint8_t {
    kNone,
    kBool,
    kInt,
    kFloat,
    kText,
    kBytes,  // and integers of more than 64 bits
    kTuple,
    kList,
    kDict,
    kGlobal,     // a function or a class: `text` is "module.name"
    kObject,     // what calling the global `text` with `arguments` would give
    kPersistent  // data that the program that wrote the pickle keeps beside it: `arguments` say what
  };
  Kind kind = Kind::kNone;
  bool has_state = false;
  int64_t integer = 0;  // of kBool and kInt
  double real = 0;      // of kFloat
  std::string text = {};
  // The values of tuples and lists; the keys and values of dicts, alternating; of objects, the parts that they were
  // made of.
  std::vector<uint32_t> items = {};
  uint32_t arguments = 0, state = 0;  // of objects; `state` where has_state is true
};

class Pickle {
 public:
  // `takes`: whether a global may be there. kInvalidArgument: an opcode or a global that is not known, by its name.
  // kDataLoss: it is no whole pickle. `path` is for messages.
  static absl::StatusOr<Pickle> Parse(std::string_view bytes,
                                      absl::FunctionRef<bool(std::string_view global)> takes,
                                      std::string_view path);

  const PickleValue& root() const { return values_[root_]; }
  const PickleValue& operator[](uint32_t reference) const { return values_[reference]; }
  // The value for that text in a dict or an OrderedDict; null if there is none.
  const PickleValue* Find(const PickleValue& dict, std::string_view key) const;

 private:
  friend class PickleParser;
  std::deque<PickleValue> values_;
  uint32_t root_ = 0;
};

bool IsDict(const PickleValue& value);

}  // namespace ebb
