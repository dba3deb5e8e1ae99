// All problems of a configuration, each with its place in the file.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "ebb/runtime/base/message.h"

namespace ebb::config {

class Problems {
 public:
  // For a configuration that is not a file: without places.
  Problems() = default;
  explicit Problems(std::string text) : text_(std::move(text)) {}

  // Notes that the key of this path is at this byte of the text.
  void Locate(std::string path, size_t offset) { offsets_.emplace(std::move(path), offset); }

  // `path` as in the file; the file need not have it.
  void Add(std::string_view path, std::initializer_list<std::string_view> sentence);
  // For a key at this byte of the text.
  void AddAt(size_t offset, std::string_view path, std::string sentence);
  // The key that an unknown key probably means. If the file does not have that key, its absence is
  // not reported, too.
  void AddNearest(std::string_view path) {
    if (!offsets_.contains(path)) meant_.emplace_back(path);
  }
  // A conflict between keys that are allowed by themselves. Left out if one of the keys is wrong.
  void AddTogether(std::string_view path, std::initializer_list<std::string_view> sentence);
  // A conflict whose sentence begins with the key: "its path" and then `rest`.
  void AddConflict(std::string_view path, std::initializer_list<std::string_view> rest) {
    AddTogether(path, {Quoted(path), Join(rest)});
  }

  // kInvalidArgument with all problems in the file's order, or OK.
  absl::Status status() const;

 private:
  struct Problem {
    size_t offset;
    std::string path, sentence;
  };
  bool FollowsFromWrongType(const Problem& problem) const;

  std::string text_;
  std::map<std::string, size_t, std::less<>> offsets_;
  std::vector<Problem> problems_;
  size_t dropped_ = 0;                      // problems beyond the maximum
  std::vector<std::string> wrong_, meant_;  // paths: from Add, from AddNearest
};

// "line 3, column 5".
std::string Place(std::string_view text, size_t offset);

}  // namespace ebb::config
