#include "ebb/runtime/config/document.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/config/message.h"

namespace ebb::config {
namespace {

std::string Place(std::string_view text, size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const size_t line_start = before.rfind('\n') + 1;  // npos + 1 is 0
  return Join({"line ", std::to_string(1 + std::count(before.begin(), before.end(), '\n')),
               ", column ", std::to_string(1 + before.size() - line_start)});
}

// Blanks comments and trailing commas, so that every other byte stays where it was.
class Relaxed {
 public:
  explicit Relaxed(std::string_view text) : text_(text) {}

  absl::StatusOr<std::string> Strict() && {
    while (at_ < text_.size()) {
      const std::string_view rest = std::string_view(text_).substr(at_);
      if (rest.starts_with("//") || rest.starts_with('#')) {
        Blank(std::min(text_.find('\n', at_), text_.size()));
      } else if (rest.starts_with("/*")) {
        const size_t end = text_.find("*/", at_ + 2);
        if (end == std::string::npos) {
          return Invalid({Place(text_, at_), ": the comment does not end"});
        }
        Blank(end + 2);
      } else {
        Token();
      }
    }
    return std::move(text_);
  }

 private:
  void Blank(size_t end) {
    for (; at_ < end; ++at_) {
      if (text_[at_] != '\n') text_[at_] = ' ';
    }
  }

  void Token() {
    const char c = text_[at_];
    if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
      ++at_;
      return;
    }
    if ((c == '}' || c == ']') && last_ == ',' && follows_value_) text_[comma_] = ' ';
    // [,] and [1,,] stay what they are: wrong.
    follows_value_ = c == ',' && last_ != ',' && last_ != '[' && last_ != '{';
    if (c == ',') comma_ = at_;
    last_ = c;
    ++at_;
    if (c == '"') SkipString();
  }

  void SkipString() {
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    at_ = std::min(at_ + 1, text_.size());
  }

  std::string text_;
  size_t at_ = 0, comma_ = 0;
  char last_ = '[';  // the last character that is neither space nor comment
  bool follows_value_ = false;
};

// Builds the document from the parser's events and stops it at the first thing it does not accept.
class Builder : public nlohmann::json_sax<Json> {
 public:
  explicit Builder(std::string_view text) : text_(text) {}

  absl::StatusOr<Json> Result() && {
    if (!error_.ok()) return std::move(error_);
    return std::move(root_);
  }

  bool null() override { return Put(nullptr) != nullptr; }
  bool boolean(bool value) override { return Put(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Put(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Put(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override {
    return Put(value) != nullptr;
  }
  bool string(string_t& value) override { return Put(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return Refuse({"JSON has no binary values"}); }

  bool start_object(size_t) override { return Open(Json::object()); }
  bool start_array(size_t) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }

  bool key(string_t& name) override {
    auto* object = open_.back()->get_ptr<Json::object_t*>();
    if (object->size() >= kObjectKeysMax) {
      return Refuse({Path(""), " has more than ", std::to_string(kObjectKeysMax), " keys"});
    }
    names_.back() = name;
    const auto [entry, is_new] = object->emplace(name, nullptr);
    if (!is_new) return Refuse({"the key ", Path(name), " is there twice"});
    slot_ = &entry->second;
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& problem) override {
    // The parser's sentence comes after its own words for the place, or after its error number.
    std::string_view what = problem.what();
    if (size_t end = what.find("column "); end != std::string_view::npos) {
      what = what.substr(std::min(what.find(": ", end), what.size() - 2) + 2);
    } else if (end = what.find("] "); end != std::string_view::npos) {
      what = what.substr(end + 2);
    }
    // The position counts the bytes read, the offending one included.
    const size_t offset = position == 0 ? 0 : position - 1;
    return Refuse({Place(text_, offset), ": ", Shortened(what, 200)});
  }

 private:
  bool Refuse(std::initializer_list<std::string_view> pieces) {
    if (error_.ok()) error_ = Invalid(pieces);
    return false;
  }

  // Where the next value goes: the root, the key just read, or the end of the open array.
  Json* Put(Json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (auto* array = open_.back()->get_ptr<Json::array_t*>()) {
      array->push_back(std::move(value));
      return &array->back();
    }
    *slot_ = std::move(value);
    return slot_;
  }

  bool Open(Json empty) {
    if (open_.size() >= kDocumentDepthMax) {
      return Refuse({Path(""), " nests deeper than ", std::to_string(kDocumentDepthMax)});
    }
    open_.push_back(Put(std::move(empty)));
    names_.emplace_back();
    return true;
  }

  bool Close() {
    open_.pop_back();
    names_.pop_back();
    return true;
  }

  // Of the innermost open object, or of its key `name`.
  std::string Path(std::string_view name) const {
    std::string path;
    for (size_t i = 0; i + 1 < names_.size(); ++i) {
      if (!names_[i].empty()) path += Join({path.empty() ? "" : ".", names_[i]});
    }
    if (!name.empty()) path += Join({path.empty() ? "" : ".", name});
    return path.empty() ? "the configuration" : Quoted(path);
  }

  std::string_view text_;
  Json root_;
  absl::Status error_;
  std::vector<Json*> open_;         // the objects and arrays around the next value, outermost first
  std::vector<std::string> names_;  // for each, the key that was read last
  Json* slot_ = nullptr;            // the value of that key in the innermost object
};

}  // namespace

absl::StatusOr<Json> ParseDocument(std::string_view text) {
  if (text.size() > kDocumentBytesMax) {
    return Invalid({"it has more than ", std::to_string(kDocumentBytesMax),
                    " bytes, the most that a configuration may have"});
  }
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return Invalid({"it is empty; the least configuration is {\"train_batch_size\": 8}"});
  }
  absl::StatusOr<std::string> strict = Relaxed(text).Strict();
  if (!strict.ok()) return strict.status();
  Builder builder(*strict);
  Json::sax_parse(*strict, &builder);
  absl::StatusOr<Json> document = std::move(builder).Result();
  if (document.ok() && !document->is_object()) {
    return Invalid({"it must be an object, {...}, and is ", Shown(*document)});
  }
  return document;
}

}  // namespace ebb::config
