// Python's pickles, as values. No code of a pickle is executed: a global is a name, and a call or
// an object is the name of its function or class, with the arguments.
//
//   torch.save({"param": tensor})
//   {"param": torch._utils._rebuild_tensor_v2(persistent("storage", ...), 0, (3, 4), (4, 1), ...)}
//
// A pickle is untrusted. Only the opcodes that torch.save and plain data need are known; any other
// is an error that names it. Values may refer to one another in cycles, so a walk through all of
// them needs a limit of its own.
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

// The limits of a pickle: at most 88 MiB of values.
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
    kObject,     // the result of a call of the global `text` with `arguments`
    kPersistent  // data that the writing program keeps outside of the pickle; `arguments` name it
  };
  Kind kind = Kind::kNone;
  bool has_state = false;
  int64_t integer = 0;  // of kBool and kInt
  double real = 0;      // of kFloat
  std::string text = {};
  // The values of tuples and lists; the keys and values of dicts, alternating; the items that were
  // added to objects.
  std::vector<uint32_t> items = {};
  uint32_t arguments = 0, state = 0;  // of objects; `state` where has_state is true
};

class Pickle {
 public:
  // `takes`: whether a global is allowed. kInvalidArgument names an unknown opcode or global.
  // kDataLoss: not a whole pickle. `path` is for messages.
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
