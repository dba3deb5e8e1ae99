#include "ebb/runtime/checkpoint/pickle.h"

#include <bit>
#include <cstring>
#include <map>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb {
namespace {

using Kind = PickleValue::Kind;

constexpr uint8_t kProtocolMax = 5;
constexpr std::string_view kOrderedDict = "collections.OrderedDict";

// Python's names of the opcodes of protocol 2, and of later opcodes for the same values.
enum Opcode : uint8_t {
  MARK = '(',
  STOP = '.',
  NONE = 'N',
  BININT = 'J',
  BININT1 = 'K',
  BININT2 = 'M',
  BINFLOAT = 'G',
  BINUNICODE = 'X',
  BINBYTES = 'B',
  SHORT_BINBYTES = 'C',
  EMPTY_TUPLE = ')',
  TUPLE = 't',
  EMPTY_LIST = ']',
  APPEND = 'a',
  APPENDS = 'e',
  EMPTY_DICT = '}',
  SETITEM = 's',
  SETITEMS = 'u',
  GLOBAL = 'c',
  REDUCE = 'R',
  BUILD = 'b',
  BINPERSID = 'Q',
  BINGET = 'h',
  LONG_BINGET = 'j',
  BINPUT = 'q',
  LONG_BINPUT = 'r',
  PROTO = 0x80,
  NEWOBJ = 0x81,
  TUPLE1 = 0x85,
  TUPLE2 = 0x86,
  TUPLE3 = 0x87,
  NEWTRUE = 0x88,
  NEWFALSE = 0x89,
  LONG1 = 0x8a,
  SHORT_BINUNICODE = 0x8c,
  EMPTY_SET = 0x8f,
  ADDITEMS = 0x90,
  STACK_GLOBAL = 0x93,
  MEMOIZE = 0x94,
  FRAME = 0x95
};

}  // namespace

// The stack machine. Its stack has references to values instead of objects. It calls and loads no
// code.
class PickleParser {
 public:
  PickleParser(std::string_view bytes, absl::FunctionRef<bool(std::string_view)> takes,
               std::string_view path)
      : rest_(bytes), bytes_(bytes.size()), takes_(takes), path_(path) {}

  absl::StatusOr<Pickle> Parse() {
    if (std::cmp_greater(bytes_, kPickleBytesMax))
      return Refuse(absl::StrCat("has ", bytes_, " bytes, more than ", kPickleBytesMax));
    while (true) {
      const uint8_t opcode = Number<uint8_t>();
      if (status_.ok() && opcode == STOP) break;
      if (status_.ok()) Step(opcode);
      EBB_RETURN_IF_ERROR(status_);
    }
    pickle_.root_ = Pop();
    if (!stack_.empty() || !marks_.empty()) Fail("leaves values on the stack");
    EBB_RETURN_IF_ERROR(status_);
    return std::move(pickle_);
  }

 private:
  absl::Status Refuse(std::string_view what) const {
    return absl::InvalidArgumentError(
        absl::StrCat("the pickle of '", std::string(path_), "' ", std::string(what)));
  }
  void Fail(std::string_view what) {
    if (!status_.ok()) return;
    status_ = absl::DataLossError(absl::StrCat("the pickle of '", std::string(path_), "' ",
                                               std::string(what), ", before its byte ",
                                               bytes_ - rest_.size()));
  }

  std::string_view Take(uint64_t count) {
    if (count > rest_.size()) {
      Fail("is cut");
      return {};
    }
    const std::string_view taken = rest_.substr(0, static_cast<size_t>(count));
    rest_.remove_prefix(static_cast<size_t>(count));
    return taken;
  }
  template <class T>
  T Number() {
    static_assert(std::endian::native == std::endian::little);
    const std::string_view taken = Take(sizeof(T));
    T number = 0;
    if (!taken.empty()) std::memcpy(&number, taken.data(), sizeof(number));
    return number;
  }
  std::string Line() {
    const size_t end = rest_.find('\n');
    if (end == std::string_view::npos) {
      Fail("is cut");
      return "";
    }
    const std::string line(Take(end));
    Take(1);
    return line;
  }

  void Push(PickleValue value) {
    if (std::cmp_greater_equal(pickle_.values_.size(), kPickleValuesMax)) {
      if (status_.ok())
        status_ = Refuse(absl::StrCat("has more than ", kPickleValuesMax, " values"));
      return;
    }
    stack_.push_back(static_cast<uint32_t>(pickle_.values_.size()));
    pickle_.values_.push_back(std::move(value));
  }
  void PushText(Kind kind, std::string_view text) {
    Push({.kind = kind, .text = std::string(text)});
  }
  // Opcodes that take single values take none above the last mark.
  size_t Floor() const { return marks_.empty() ? 0 : marks_.back(); }
  uint32_t Pop() {
    if (stack_.size() <= Floor()) {
      Fail("takes a value from an empty stack");
      return 0;
    }
    const uint32_t top = stack_.back();
    stack_.pop_back();
    return top;
  }
  std::vector<uint32_t> PopToMark() {
    if (marks_.empty()) {
      Fail("lacks a mark");
      return {};
    }
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(marks_.back());
    std::vector<uint32_t> taken(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return taken;
  }
  std::vector<uint32_t> PopSome(int count) {
    std::vector<uint32_t> taken(static_cast<size_t>(count));
    for (size_t i = taken.size(); i-- > 0;) taken[i] = Pop();
    return taken;
  }
  // The value on the top, to which items are added.
  PickleValue* Top() {
    if (stack_.size() > Floor()) return &pickle_.values_[stack_.back()];
    Fail("adds items, but the stack is empty");
    return nullptr;
  }
  void Fill(Kind kind, const std::vector<uint32_t>& items) {
    PickleValue* const top = Top();
    if (top == nullptr) return;
    if (top->kind != kind && top->kind != Kind::kObject)
      return Fail("adds items to a value that is not a container");
    if (kind == Kind::kDict && items.size() % 2 != 0) return Fail("has a key without its value");
    top->items.insert(top->items.end(), items.begin(), items.end());
  }

  void PushGlobal(std::string_view module, std::string_view name) {
    const std::string global = absl::StrCat(std::string(module), ".", std::string(name));
    if (!status_.ok()) return;
    if (takes_(global)) return PushText(Kind::kGlobal, global);
    status_ = Refuse(absl::StrCat("names ", config::Quoted(global),
                                  ", but only functions and classes of tensors are allowed"));
  }
  void Call() {
    const uint32_t arguments = Pop(), callee = Pop();
    if (!status_.ok()) return;
    const PickleValue &called = pickle_.values_[callee], &given = pickle_.values_[arguments];
    // In files of other objects, the result of a call may be called, too.
    if ((called.kind != Kind::kGlobal && called.kind != Kind::kObject) ||
        given.kind != Kind::kTuple)
      return Fail("calls a value that is not a function");
    PickleValue object = {.kind = Kind::kObject, .text = called.text};
    object.arguments = arguments;
    Push(std::move(object));
  }

  void Put(uint32_t place) {
    if (stack_.size() <= Floor()) return Fail("stores a value, but the stack is empty");
    memo_[place] = stack_.back();
  }
  void Get(uint32_t place) {
    const auto found = memo_.find(place);
    if (found == memo_.end()) return Fail("reads a value that it has not stored");
    stack_.push_back(found->second);
  }

  void Step(uint8_t opcode) {
    switch (opcode) {
      case PROTO:
        if (const uint8_t version = Number<uint8_t>(); version > kProtocolMax)
          Fail(absl::StrCat("has protocol ", version));
        return;
      case FRAME:
        Take(8);
        return;
      case MARK:
        marks_.push_back(stack_.size());
        return;
      case NONE:
        return Push({});
      case NEWTRUE:
      case NEWFALSE:
        return Push({.kind = Kind::kBool, .integer = opcode == NEWTRUE ? 1 : 0});
      case BININT:
        return Push({.kind = Kind::kInt, .integer = Number<int32_t>()});
      case BININT1:
        return Push({.kind = Kind::kInt, .integer = Number<uint8_t>()});
      case BININT2:
        return Push({.kind = Kind::kInt, .integer = Number<uint16_t>()});
      case LONG1:
        return PushLong(Take(Number<uint8_t>()));
      case BINFLOAT:
        return Push({.kind = Kind::kFloat,
                     .real = std::bit_cast<double>(__builtin_bswap64(Number<uint64_t>()))});
      case BINUNICODE:
        return PushText(Kind::kText, Take(Number<uint32_t>()));
      case SHORT_BINUNICODE:
        return PushText(Kind::kText, Take(Number<uint8_t>()));
      case BINBYTES:
        return PushText(Kind::kBytes, Take(Number<uint32_t>()));
      case SHORT_BINBYTES:
        return PushText(Kind::kBytes, Take(Number<uint8_t>()));
      case EMPTY_TUPLE:
        return PushItems(Kind::kTuple, {});
      case TUPLE1:
      case TUPLE2:
      case TUPLE3:
        return PushItems(Kind::kTuple, PopSome(opcode - TUPLE1 + 1));
      case TUPLE:
        return PushItems(Kind::kTuple, PopToMark());
      case EMPTY_LIST:
      case EMPTY_SET:
        return PushItems(Kind::kList, {});
      case EMPTY_DICT:
        return PushItems(Kind::kDict, {});
      case APPEND:
        return Fill(Kind::kList, PopSome(1));
      case APPENDS:
      case ADDITEMS:
        return Fill(Kind::kList, PopToMark());
      case SETITEM:
        return Fill(Kind::kDict, PopSome(2));
      case SETITEMS:
        return Fill(Kind::kDict, PopToMark());
      case GLOBAL: {
        const std::string module = Line(), name = Line();
        return PushGlobal(module, name);
      }
      case STACK_GLOBAL: {
        const std::vector<uint32_t> names = PopSome(2);
        if (!status_.ok()) return;
        const PickleValue &module = pickle_.values_[names[0]], &name = pickle_.values_[names[1]];
        if (module.kind != Kind::kText || name.kind != Kind::kText)
          return Fail("names a global by a value that is not a text");
        return PushGlobal(module.text, name.text);
      }
      case REDUCE:
      case NEWOBJ:
        return Call();
      case BUILD: {
        const uint32_t state = Pop();
        PickleValue* const top = Top();
        if (top == nullptr) return;
        top->state = state;
        top->has_state = true;
        return;
      }
      case BINPERSID: {
        PickleValue value = {.kind = Kind::kPersistent};
        value.arguments = Pop();
        return Push(std::move(value));
      }
      case BINPUT:
        return Put(Number<uint8_t>());
      case LONG_BINPUT:
        return Put(Number<uint32_t>());
      case MEMOIZE:
        return Put(static_cast<uint32_t>(memo_.size()));
      case BINGET:
        return Get(Number<uint8_t>());
      case LONG_BINGET:
        return Get(Number<uint32_t>());
      default:
        status_ = Refuse(absl::StrFormat(
            "has the opcode 0x%02x at byte %d, which tensors and plain data do not need", opcode,
            bytes_ - rest_.size() - 1));
    }
  }

  void PushItems(Kind kind, std::vector<uint32_t> items) {
    PickleValue value = {.kind = kind};
    value.items = std::move(items);
    Push(std::move(value));
  }
  // Two's complement, in the fewest bytes.
  void PushLong(std::string_view bytes) {
    if (bytes.size() > sizeof(int64_t)) return PushText(Kind::kBytes, bytes);
    const bool negative = !bytes.empty() && (static_cast<uint8_t>(bytes.back()) & 0x80) != 0;
    uint64_t number = negative ? ~uint64_t{0} : 0;
    if (!bytes.empty()) std::memcpy(&number, bytes.data(), bytes.size());
    Push({.kind = Kind::kInt, .integer = static_cast<int64_t>(number)});
  }

  std::string_view rest_;
  const size_t bytes_;
  const absl::FunctionRef<bool(std::string_view)> takes_;
  const std::string_view path_;
  absl::Status status_;  // the first error
  Pickle pickle_;
  std::vector<uint32_t> stack_;
  std::vector<size_t> marks_;  // sizes of the stack
  std::unordered_map<uint32_t, uint32_t> memo_;
};

absl::StatusOr<Pickle> Pickle::Parse(std::string_view bytes,
                                     absl::FunctionRef<bool(std::string_view global)> takes,
                                     std::string_view path) {
  return PickleParser(bytes, takes, path).Parse();
}

bool IsDict(const PickleValue& value) {
  return value.kind == Kind::kDict || (value.kind == Kind::kObject && value.text == kOrderedDict);
}

const PickleValue* Pickle::Find(const PickleValue& dict, std::string_view key) const {
  if (!IsDict(dict)) return nullptr;
  // If keys are equal, the last one counts, as in Python.
  for (size_t i = dict.items.size() / 2; i-- > 0;) {
    const PickleValue& there = values_[dict.items[2 * i]];
    if (there.kind == Kind::kText && there.text == key) return &values_[dict.items[2 * i + 1]];
  }
  return nullptr;
}

}  // namespace ebb
