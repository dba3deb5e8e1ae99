#include "ebb/runtime/config/reader.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "ebb/runtime/base/message.h"
#include "ebb/runtime/base/name_view.h"
#include "ebb/runtime/config/nearest.h"

namespace ebb::config {
namespace {

constexpr int kUnknownMax = 100;    // unknown keys that get a sentence of their own
constexpr size_t kPlacesShown = 3;  // for a misplaced key

// Whether so many edits lead to the key that was meant. Other blocks have too many short words.
bool IsNear(int edits, std::string_view name, bool is_sibling) {
  return edits * (is_sibling ? 2 : 3) <= static_cast<int>(name.size());
}

// The walk's place in the document.
struct Block {
  std::string rows = "";   // prefix of its keys' rows: "bf16."
  std::string shown = "";  // prefix of its keys in the file: "bfloat16."
  bool is_open = true;     // DeepSpeed ignores unknown keys in it
};

bool IsComment(std::string_view name) {
  return name.starts_with('_') || name.starts_with("//") || name == "$schema" ||
         absl::EqualsIgnoreCase(NameView(name), "comment");
}

// DeepSpeed reads these blocks with pydantic, which converts values with only one possible meaning.
bool IsConverted(std::string_view rows) {
  return rows.starts_with("zero_optimization.") || rows == "fp16." || rows == "bf16.";
}

class Reader {
 public:
  Reader(Problems& problems, std::optional<UnknownKeys> unknown_keys, Reading& reading)
      : problems_(problems), unknown_keys_(unknown_keys), reading_(reading) {}

  void Read(Json& object, const Block& block, Values& values) {
    for (auto& [name, value] : object.get_ref<Json::object_t&>()) {
      const std::string shown = block.shown + name;
      const bool is_named_by_user = FindKey(block.rows + "*") != nullptr;
      const Key* key = is_named_by_user ? FindKey(block.rows + "*") : FindNamed(block, name);
      if (IsComment(name) && (key == nullptr || (is_named_by_user && !value.is_object()))) {
        Say(shown, value, "a comment", nullptr);
      } else if (const WithoutMeaning* without =
                     key == nullptr ? FindWithoutMeaning(block.rows, name) : nullptr) {
        ReadWithoutMeaning(*without, shown, value);
      } else if (key == nullptr) {
        Unknown(block, name, value, unknown_ < kUnknownMax ? NearestPath(block.rows, name) : "");
      } else if (value.is_null()) {
        Say(shown, value, "not given", key);
      } else {
        ReadKey(*key, name, value, block, values);
      }
    }
  }

 private:
  static const Key* FindNamed(const Block& block, const std::string& name) {
    // A dot in a name does not lead into a block.
    return name.find('.') == std::string::npos ? FindKey(block.rows + name) : nullptr;
  }

  void Say(const std::string& shown, const Json& value, std::string how, const Key* key) {
    reading_.keys.push_back({shown, Shown(value), std::move(how), key});
  }

  void ReadKey(const Key& row, const std::string& name, Json& value, const Block& block,
               Values& values) {
    const std::string shown = block.shown + name;
    const Key& key = row.same_as.empty() ? row : *FindKey(row.same_as);
    if (row.is_deprecated) {
      Remark(reading_.remarks, {Quoted(shown), " is an old name of ", Quoted(key.path)});
    }
    if (key.path.ends_with(".*")) {
      if (!Check(key, value, shown, problems_)) return;
      return Read(value, {.rows = Join({key.path, "."}), .shown = shown + ".", .is_open = false},
                  values.groups[name]);
    }
    Convert(key, shown, block, value);
    if (key.kind == Kind::kPaths && value == "") return Say(shown, value, "not given", &key);
    const auto [other, is_new] = values.given.emplace(key.path, Given{&value, shown});
    if (!is_new && key.may_repeat) {
      return TakeSecond(key, &row == &key, shown, value, other->second);
    }
    if (!is_new && key.must_agree) return CompareSecond(key, shown, value, other->second);
    if (!is_new) {
      return problems_.Add(shown, {Quoted(other->second.shown), " and ", Quoted(shown),
                                   " are two names of one key; give one"});
    }
    if (IsAuto(key, value)) {
      other->second.value = nullptr;
      return Say(shown, value, "auto", &key);
    }
    if (!Check(key, value, shown, problems_)) {
      values.given.erase(other);
      return;
    }
    Take(key, value, shown);
    if (key.is_block()) {
      Read(value,
           {.rows = Join({key.path, "."}),
            .shown = shown + ".",
            .is_open = key.kind == Kind::kOpenBlock},
           values);
    }
  }

  // The value of a key that was already read under another name: the row's name wins.
  void TakeSecond(const Key& key, bool is_rows_name, const std::string& shown, const Json& value,
                  Given& first) {
    if (!IsAuto(key, value) && !Check(key, value, shown, problems_)) return;
    if (first.value != nullptr && *first.value == value) return;
    const std::string unread = is_rows_name ? first.shown : shown;
    if (is_rows_name) first = {IsAuto(key, value) ? nullptr : &value, shown};
    Remark(reading_.remarks,
           {Quoted(unread), " is not read beside ", Quoted(key.path), ", as in DeepSpeed"});
    Say(shown, value, is_rows_name ? "literally" : "not read", &key);
  }

  // Two names of one key, each with a value, must agree.
  void CompareSecond(const Key& key, const std::string& shown, const Json& value,
                     const Given& first) {
    if (!IsAuto(key, value) && !Check(key, value, shown, problems_)) return;
    Say(shown, value, "literally", &key);
    if (first.value == nullptr || IsAuto(key, value) || *first.value == value) return;
    problems_.Add(shown, {Quoted(first.shown), " is ", Shown(*first.value), ", and ", Quoted(shown),
                          " is ", Shown(value), ": they mean the same, so give one, or one value"});
  }

  void Convert(const Key& key, const std::string& shown, const Block& block, Json& value) {
    std::optional<Json> converted;
    std::string why = "as DeepSpeed does";
    if (key.path == "zero_optimization" && value.is_boolean()) {
      converted = Json{{"stage", value.get<bool>() ? 1 : 0}};
      why = "an old form";
    } else if (shown == "tensor_parallel.autotp_size" && value == 0) {
      converted = 1;
    } else if (IsConverted(block.rows)) {
      converted = Converted(key, value);
    }
    if ((key.taken == Taken::kUpperLimit || key.taken == Taken::kApproximated) &&
        IsTooLarge(key, value)) {
      value = INT64_MAX;  // no limit
    }
    if (!converted.has_value()) return;
    Remark(reading_.remarks,
           {Quoted(shown), " ", Shown(value), " is taken as ", Shown(*converted), ", ", why});
    value = *std::move(converted);
  }

  void Take(const Key& key, const Json& value, const std::string& shown) {
    const bool is_harmless = IsHarmless(key, value);
    if (key.taken == Taken::kRefused && !is_harmless) {
      return problems_.Add(shown, {WhatIsRefused(key, value, shown), ": ", key.meaning,
                                   key.harmless.empty() || key.kind == Kind::kAnything
                                       ? ""
                                       : "; allowed: " + Allowed(key)});
    }
    std::string how = "literally";
    if (!is_harmless && key.taken == Taken::kUpperLimit) {
      how = Join({"an upper limit: ", key.meaning});
    } else if (!is_harmless && key.taken == Taken::kApproximated) {
      how = Join({"approximated: ", key.meaning});
    }
    if (how != "literally") {
      Remark(reading_.remarks, {Quoted(shown), " ", Shown(value), " is ", how});
    }
    if (!key.is_block()) {
      Say(shown, value, std::move(how), &key);
    }
  }

  static std::string WhatIsRefused(const Key& key, const Json& value, const std::string& shown) {
    if (!value.is_object()) return Join({Quoted(shown), " is ", Shown(value)});
    return key.harmless == "disabled" ? Join({Quoted(shown + ".enabled"), " is true"})
                                      : Join({Quoted(shown), " is given"});
  }

  void ReadWithoutMeaning(const WithoutMeaning& without, const std::string& shown, Json& value) {
    if (value.is_null()) return Say(shown, value, "not given", nullptr);
    Remark(reading_.remarks, {Quoted(shown), " has no meaning here: ", without.why});
    Say(shown, value, Join({"without meaning: ", without.why}), nullptr);
    if (without.inner.empty() || !value.is_object()) return;
    for (const auto& [name, element] : value.items()) {
      if (IsComment(name) || HasWord(without.inner, name)) continue;
      const std::string nearest = NearestWord(without.inner, name);
      Unknown({.rows = shown + ".", .shown = shown + ".", .is_open = false}, name, element,
              Join({shown, ".", nearest}));
    }
  }

  void Unknown(const Block& block, const std::string& name, const Json& value,
               const std::string& nearest) {
    ++unknown_;
    const std::string shown = Quoted(block.shown + name);
    // A dot in a name does not lead into a block, but shows which one was meant.
    const size_t dot = name.rfind('.') + 1;  // npos + 1 is 0
    const std::string_view last = std::string_view(name).substr(dot);
    const Key* const meant = dot == 0 ? nullptr : FindKey(block.rows + name.substr(0, dot - 1));
    const size_t name_at = nearest.rfind('.') + 1;  // likewise
    const bool is_sibling =
        !nearest.empty() && nearest.substr(0, name_at) == block.rows + name.substr(0, dot);
    const int edits = nearest.empty() ? 0 : EditDistance(last, nearest.substr(name_at));
    const bool has_its_words = !nearest.empty() &&
                               HasWordsOf(last, std::string_view(nearest).substr(name_at)) &&
                               (is_sibling || last.find('_') != last.npos);
    const bool is_dotted = meant != nullptr;
    std::string hint;
    if (FindKey(block.rows + name) != nullptr) {
      hint = " is one name with a dot in it; write nested objects instead";
    } else if (!is_sibling && !nearest.empty() && edits == 0) {
      hint = Join({" is not a key; ", Misplaced(last, nearest)});
    } else if (nearest.empty() || !(IsNear(edits, last, is_sibling) || has_its_words)) {
      hint = " is not a key";
    } else {
      hint =
          Join({" is not a key; the nearest is ",
                Quoted(is_sibling && !is_dotted ? block.shown + nearest.substr(name_at) : nearest),
                is_dotted ? ", in nested objects instead of one name with a dot" : ""});
    }
    // Up to two typing errors, in a name long enough not to be another word.
    const bool is_misspelled =
        is_sibling && edits * 3 <= static_cast<int>(name.size()) && edits <= 2;
    const bool refuses = unknown_keys_.has_value() ? *unknown_keys_ == UnknownKeys::kError
                                                   : !block.is_open || is_misspelled || is_dotted;
    if (refuses) {
      problems_.Add(block.shown + name, {shown, hint});
      if (!nearest.empty()) problems_.AddNearest(nearest);
      return;
    }
    if (unknown_ > kUnknownMax) {
      return Remark(reading_.warnings, {"more unknown keys are ignored"});
    }
    const bool says_nearest = is_misspelled || is_dotted || (!is_sibling && edits == 0) ||
                              (has_its_words && last.find('_') != last.npos);
    Remark(reading_.warnings,
           {shown, says_nearest ? hint : " is not a key",
            block.is_open ? "; it is ignored, as in DeepSpeed" : "; it is ignored"});
    Say(block.shown + name, value, "unknown: ignored", nullptr);
  }

  static bool IsNeverTaken(const Key& key) {
    return key.taken == Taken::kRefused && key.harmless.empty();
  }

  // The places for a key of this name. `nearest` is one of them.
  static std::string Misplaced(std::string_view name, const std::string& nearest) {
    if (const Key* key = FindKey(nearest); key != nullptr && IsNeverTaken(*key)) {
      return Join({Quoted(nearest), " is, but Ebb refuses it: ", key->meaning});
    }
    const std::vector<std::string> all = PathsNamed(name);
    if (all.size() > 1 && all.size() <= kPlacesShown) {
      std::string paths;
      for (const std::string& path : all)
        paths += Join({paths.empty() ? "" : " and ", Quoted(path)});
      return Join({paths, " are: move it to where it is meant"});
    }
    const size_t dot = nearest.rfind('.');
    const std::string place = dot == std::string::npos
                                  ? "to the top level"
                                  : Join({"into ", Quoted(nearest.substr(0, dot))});
    return Join({Quoted(nearest), " is: move it ", place});
  }

  Problems& problems_;
  std::optional<UnknownKeys> unknown_keys_;
  Reading& reading_;
  int unknown_ = 0;
};

// The file's own setting for unknown keys.
std::optional<UnknownKeys> OwnUnknownKeys(const Json& root) {
  const auto ebb = root.find("ebb");
  if (ebb == root.end() || !ebb->is_object()) return std::nullopt;
  const auto given = ebb->find("unknown_keys");
  if (given == ebb->end() || !given->is_string()) return std::nullopt;
  const std::string word = given->get<std::string>();
  if (!FindWord("error", word).empty()) return UnknownKeys::kError;
  if (!FindWord("warn", word).empty()) return UnknownKeys::kWarn;
  return std::nullopt;
}

}  // namespace

const Given* Values::Find(std::string_view path) const {
  const auto found = given.find(path);
  return found == given.end() ? nullptr : &found->second;
}

const Json* Values::Value(std::string_view path) const {
  const Given* found = Find(path);
  return found == nullptr ? nullptr : found->value;
}

std::string_view Values::Type(std::string_view block) const {
  const Key& key = *FindKey(Join({block, ".type"}));
  const Json* value = Value(key.path);
  return value == nullptr ? key.default_value : FindWord(key.words, value->get<std::string>());
}

Reading ReadValues(Document& document, std::optional<UnknownKeys> unknown_keys) {
  Reading reading;
  if (!unknown_keys.has_value()) unknown_keys = OwnUnknownKeys(document.root);
  Reader(document.problems, unknown_keys, reading).Read(document.root, {}, reading.values);
  return reading;
}

void Remark(std::vector<std::string>& remarks, std::initializer_list<std::string_view> sentence) {
  std::string text = Join(sentence);
  if (std::ranges::find(remarks, text) == remarks.end()) remarks.push_back(std::move(text));
}

}  // namespace ebb::config
