// All that is wrong with a configuration, each problem with its place in the file.
#pragma once

#include <initializer_list>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace ebb::config {

class Problems {
 public:
  // Of a configuration that is no file: without places.
  Problems() = default;
  explicit Problems(std::string text) : text_(std::move(text)) {}

  // That the key of this path stands at this byte of the text.
  void Locate(std::string path, size_t offset) { offsets_.emplace(std::move(path), offset); }

  // `path` as the file has it; it need not be there.
  void Add(std::string_view path, std::initializer_list<std::string_view> sentence);
  // Of a key at this byte of the text.
  void AddAt(size_t offset, std::string_view path, std::string sentence);
  // The key that an unknown one probably stands for, unless it is there: that it is missing is no
  // problem of its own.
  void AddNearest(std::string_view path) {
    if (!offsets_.contains(path)) meant_.emplace_back(path);
  }
  // What follows from keys that are allowed by themselves. Nothing follows from one that is wrong.
  void AddTogether(std::string_view path, std::initializer_list<std::string_view> sentence);

  // kInvalidArgument with all of them in the file's order, or ok.
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
  size_t dropped_ = 0;                      // beyond as many as anything is worth
  std::vector<std::string> wrong_, meant_;  // paths: of Add, of AddNearest
};

// "line 3, column 5".
std::string Place(std::string_view text, size_t offset);

}  // namespace ebb::config
