#include "ebb/runtime/config/reader.h"

#include <algorithm>
#include <utility>

#include "ebb/runtime/config/message.h"
#include "ebb/runtime/config/nearest.h"
#include "ebb/runtime/config/status_macros.h"

namespace ebb::config {
namespace {

constexpr size_t kPlacesShown = 3;  // of a key that stands where it is none

// Where the walk through the document stands.
struct Block {
  std::string rows;   // prefix of the rows of its keys: "bf16."
  std::string shown;  // prefix of its keys as the file has them: "bfloat16."
  bool is_open = false;
  // The outermost block without meaning around it: one remark for all of its keys.
  const Key* without_meaning = nullptr;
  std::string without_meaning_shown = "";
};

// DeepSpeed's blocks of features that are refused may stand there switched off.
bool HasFlag(const Json& value, bool wanted) {
  if (!value.is_structured()) return false;
  for (const auto& [name, element] : value.items()) {
    if (name == "enabled" && element.is_boolean() && element.get<bool>() == wanted) return true;
    if (HasFlag(element, wanted)) return true;
  }
  return false;
}
bool IsSwitchedOff(const Json& block) {
  return block.empty() || (HasFlag(block, false) && !HasFlag(block, true));
}

class Reader {
 public:
  explicit Reader(std::vector<std::string>& remarks) : remarks_(remarks) {}

  absl::Status Read(const Json& object, const Block& block, Values& values) {
    for (const auto& [name, value] : object.items()) {
      const Key* key = FindNamed(block, name);
      if (key == nullptr) {
        if (!block.is_open) return Unknown(block, name);
        if (block.without_meaning != nullptr) RemarkWithoutMeaning(block);
        continue;
      }
      if (value.is_null()) continue;
      EBB_RETURN_IF_ERROR(ReadKey(*key, name, value, block, values));
    }
    return absl::OkStatus();
  }

 private:
  static const Key* FindNamed(const Block& block, const std::string& name) {
    // A dot in a name is no step into a block.
    const Key* key = nullptr;
    if (name.find('.') == std::string::npos) key = FindKey(block.rows + name);
    return key != nullptr ? key : FindKey(block.rows + "*");
  }

  absl::Status ReadKey(const Key& row, const std::string& name, const Json& value,
                       const Block& block, Values& values) {
    const std::string shown = block.shown + name;
    const Key& key = row.same_as.empty() ? row : *FindKey(row.same_as);
    if (row.is_deprecated) {
      Remark(remarks_, Join({Quoted(shown), " is an old name of ", Quoted(key.path)}));
    }
    if (key.path.ends_with(".*")) {
      EBB_RETURN_IF_ERROR(Check(key, value, shown));
      return Read(value, {.rows = Join({key.path, "."}), .shown = shown + "."},
                  values.groups[name]);
    }
    const auto [other, is_new] = values.given.emplace(key.path, Given{&value, shown});
    if (!is_new && key.may_repeat && IsSame(key, other->second, value)) return absl::OkStatus();
    if (!is_new) {
      return Invalid({Quoted(other->second.shown), " and ", Quoted(shown),
                      " are two names of one key; give one"});
    }
    if (IsAuto(key, value)) return ReadAuto(key, shown, block, values);
    EBB_RETURN_IF_ERROR(Check(key, value, shown));
    if (key.kind == Kind::kBlock || key.kind == Kind::kOpenBlock) {
      return ReadBlock(key, value, shown, block, values);
    }
    return Take(key, value, shown, block);
  }

  // Of a value that has been read under another name.
  static bool IsSame(const Key& key, const Given& given, const Json& value) {
    return given.value == nullptr ? IsAuto(key, value) : *given.value == value;
  }

  absl::Status ReadBlock(const Key& key, const Json& value, const std::string& shown,
                         const Block& block, Values& values) {
    Block inner = {.rows = Join({key.path, "."}),
                   .shown = shown + ".",
                   .is_open = key.kind == Kind::kOpenBlock,
                   .without_meaning = block.without_meaning,
                   .without_meaning_shown = block.without_meaning_shown};
    if (key.taken == Taken::kNoMeaning && inner.without_meaning == nullptr) {
      inner.without_meaning = &key;
      inner.without_meaning_shown = shown;
    }
    EBB_RETURN_IF_ERROR(Read(value, inner, values));
    if (key.taken == Taken::kRefused && !(inner.is_open && IsSwitchedOff(value))) {
      return Invalid({Quoted(shown), " is given: ", key.meaning});
    }
    return absl::OkStatus();
  }

  absl::Status Take(const Key& key, const Json& value, const std::string& shown,
                    const Block& block) {
    switch (key.taken) {
      case Taken::kLiterally:
        break;
      case Taken::kUpperLimit:
        Remark(remarks_,
               Join({Quoted(shown), " ", Shown(value), " is an upper limit: ", key.meaning}));
        break;
      case Taken::kApproximated:
        Remark(remarks_,
               Join({Quoted(shown), " ", Shown(value), " is approximated: ", key.meaning}));
        break;
      case Taken::kNoMeaning:
        if (block.without_meaning != nullptr) {
          RemarkWithoutMeaning(block);
        } else {
          Remark(remarks_, Join({Quoted(shown), " has no meaning here: ", key.meaning}));
        }
        break;
      case Taken::kRefused:
        if (!IsHarmless(key, value)) {
          return Invalid({Quoted(shown), " is ", Shown(value), ": ", key.meaning,
                          key.harmless.empty() ? "" : "; allowed: ",
                          key.harmless.empty() ? "" : Allowed(key)});
        }
        break;
    }
    return absl::OkStatus();
  }

  // Hugging Face's Trainer puts its own arguments where a file says "auto".
  static bool IsAuto(const Key& key, const Json& value) {
    const std::string* text = value.get_ptr<const std::string*>();
    return text != nullptr && *text == "auto" && key.kind != Kind::kText &&
           key.kind != Kind::kAnything && key.kind != Kind::kBlock &&
           key.kind != Kind::kOpenBlock && FindWord(key.words, "auto").empty();
  }

  absl::Status ReadAuto(const Key& key, const std::string& shown, const Block& block,
                        Values& values) {
    values.given[key.path].value = nullptr;
    return key.taken == Taken::kNoMeaning ? Take(key, "auto", shown, block) : absl::OkStatus();
  }

  void RemarkWithoutMeaning(const Block& block) {
    Remark(remarks_, Join({Quoted(block.without_meaning_shown),
                           " has no meaning here: ", block.without_meaning->meaning}));
  }

  static absl::Status Unknown(const Block& block, const std::string& name) {
    const std::string shown = Quoted(block.shown + name);
    if (FindKey(block.rows + name) != nullptr) {
      return Invalid({shown, " is one name with a dot in it; write nested objects instead"});
    }
    const Key* nearest = NearestKey(block.rows, name);
    if (nearest == nullptr) return Invalid({shown, " is not a key"});
    const bool is_sibling = nearest->path.starts_with(block.rows) &&
                            nearest->path.find('.', block.rows.size()) == std::string_view::npos;
    if (!is_sibling &&
        EditDistance(name, nearest->path.substr(nearest->path.rfind('.') + 1)) == 0) {
      return Invalid({shown, " is not a key; ", Misplaced(name, *nearest)});
    }
    return Invalid({shown, " is not a key; the nearest is ",
                    Quoted(is_sibling ? Join({block.shown, nearest->path.substr(block.rows.size())})
                                      : std::string(nearest->path))});
  }

  // Where a key of this name belongs. `nearest` is one.
  static std::string Misplaced(std::string_view name, const Key& nearest) {
    const std::vector<const Key*> all = KeysNamed(name);
    if (all.size() > 1 && all.size() <= kPlacesShown) {
      std::string paths;
      for (const Key* key : all) paths += Join({paths.empty() ? "" : " and ", Quoted(key->path)});
      return Join({paths, " are: move it to where it is meant"});
    }
    const size_t dot = nearest.path.rfind('.');
    const std::string place = dot == std::string_view::npos
                                  ? "to the top level"
                                  : Join({"into ", Quoted(nearest.path.substr(0, dot))});
    return Join({Quoted(nearest.path), " is: move it ", place});
  }

  std::vector<std::string>& remarks_;
};

}  // namespace

const Given* Values::Find(std::string_view path) const {
  const auto found = given.find(path);
  return found == given.end() ? nullptr : &found->second;
}

const Json* Values::Value(std::string_view path) const {
  const Given* found = Find(path);
  return found == nullptr ? nullptr : found->value;
}

absl::StatusOr<Values> ReadValues(const Json& document, std::vector<std::string>& remarks) {
  Values values;
  EBB_RETURN_IF_ERROR(Reader(remarks).Read(document, Block{}, values));
  return values;
}

void Remark(std::vector<std::string>& remarks, std::string sentence) {
  if (std::find(remarks.begin(), remarks.end(), sentence) == remarks.end()) {
    remarks.push_back(std::move(sentence));
  }
}

}  // namespace ebb::config
