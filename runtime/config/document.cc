#include "ebb/runtime/config/document.h"

#include <algorithm>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "ebb/runtime/base/message.h"

namespace ebb::config {
namespace {

// Replaces comments and trailing commas by blanks, so that all other bytes keep their places. Notes
// where each value and each key begins.
class Relaxed {
 public:
  explicit Relaxed(std::string_view text) : text_(text) {
    if (text.starts_with("\xef\xbb\xbf")) at_ = 3;  // a byte order mark
  }

  const std::vector<size_t>& tokens() const { return tokens_; }

  absl::StatusOr<std::string> Strict() {
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
    return text_;
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
    // [,] and [1,,] stay as they are, because they are wrong.
    follows_value_ = c == ',' && last_ != ',' && last_ != '[' && last_ != '{';
    if (c == ',') comma_ = at_;
    last_ = c;
    constexpr std::string_view kPunctuation = "]}:,";
    if (kPunctuation.find(c) == std::string_view::npos) tokens_.push_back(at_);
    ++at_;
    if (c == '"') {
      SkipString();
    } else if (c != '{' && c != '[' && kPunctuation.find(c) == std::string_view::npos) {
      at_ = std::min(text_.find_first_of(" \t\r\n\"{}[]:,/#", at_), text_.size());
    }
  }

  void SkipString() {
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    at_ = std::min(at_ + 1, text_.size());
  }

  std::string text_;
  std::vector<size_t> tokens_;
  size_t at_ = 0, comma_ = 0;
  char last_ = '[';  // the last character that is neither space nor comment
  bool follows_value_ = false;
};

// Builds the document from the parser's events, and stops at the first error.
class Builder : public nlohmann::json_sax<Json> {
 public:
  Builder(std::string_view text, const std::vector<size_t>& tokens)
      : text_(text), tokens_(tokens), document_{{}, Problems(std::string(text))} {}

  absl::StatusOr<Document> Result() && {
    if (!error_.ok()) return std::move(error_);
    return std::move(document_);
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
      names_.back().clear();
      return Refuse({Shown(), " has more than ", std::to_string(kObjectKeysMax), " keys"});
    }
    names_.back() = name;
    const size_t offset = NextToken();
    const auto [entry, is_new] = object->emplace(name, nullptr);
    slot_ = is_new ? &entry->second : &repeated_.emplace_back();
    if (is_new) {
      document_.problems.Locate(Path(), offset);
    } else {
      document_.problems.AddAt(offset, Path(),
                               Join({"the key ", Quoted(Path()), " is there twice"}));
    }
    return true;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& problem) override {
    // The parser's sentence comes after its own description of the place, or after its error
    // number.
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

  // The place of this event's token: every key and every value is a token.
  size_t NextToken() { return token_ < tokens_.size() ? tokens_[token_++] : text_.size(); }

  // The place of the next value: the root, the key just read, or the end of the open array.
  Json* Put(Json value) {
    NextToken();
    if (open_.empty()) {
      document_.root = std::move(value);
      return &document_.root;
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
      return Refuse({Shown(), " nests deeper than ", std::to_string(kDocumentDepthMax)});
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

  // The path of the last key.
  std::string Path() const {
    std::string path;
    for (const std::string& name : names_) {
      if (!name.empty()) path += Join({path.empty() ? "" : ".", name});
    }
    return path;
  }
  std::string Shown() const { return names_.size() <= 1 ? "the configuration" : Quoted(Path()); }

  std::string_view text_;
  const std::vector<size_t>& tokens_;
  size_t token_ = 0;
  Document document_;
  absl::Status error_;
  std::vector<Json*> open_;         // the open objects and arrays, outermost first
  std::vector<std::string> names_;  // for each of them, its last key
  Json* slot_ = nullptr;            // the value of that key in the innermost object
  std::list<Json> repeated_;        // values of keys that occur twice
};

}  // namespace

absl::StatusOr<Document> ParseDocument(std::string_view text) {
  if (text.size() > kDocumentBytesMax) {
    return Invalid(
        {"it has more than ", std::to_string(kDocumentBytesMax), " bytes, the most that is read"});
  }
  if (text.find_first_not_of(" \t\r\n") == std::string_view::npos) {
    return Invalid({"it must be an object, {...}, but it is empty"});
  }
  Relaxed relaxed(text);
  const absl::StatusOr<std::string> strict = relaxed.Strict();
  if (!strict.ok()) return strict.status();
  Builder builder(*strict, relaxed.tokens());
  Json::sax_parse(*strict, &builder);
  absl::StatusOr<Document> document = std::move(builder).Result();
  if (document.ok() && !document->root.is_object()) {
    return Invalid({"it must be an object, {...}, but it is ", Shown(document->root)});
  }
  return document;
}

}  // namespace ebb::config
