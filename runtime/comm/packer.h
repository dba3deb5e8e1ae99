// Numbers, texts, statuses and lists of these as bytes, one after the other, and back.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace ebb {

template <class T>
concept PackedNumber = std::is_integral_v<T> || std::is_enum_v<T>;

class Packer {
 public:
  template <class... Values>
  Packer& Add(const Values&... values) {
    (AddOne(values), ...);
    return *this;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  template <PackedNumber Number>
  void AddOne(Number number) {
    AddNumber(static_cast<uint64_t>(number));
  }
  void AddOne(double number) { AddNumber(std::bit_cast<uint64_t>(number)); }
  void AddOne(std::string_view text);
  void AddOne(const absl::Status& status);
  template <class Value>
  void AddOne(const std::vector<Value>& values) {
    AddNumber(values.size());
    for (const Value& value : values) AddOne(value);
  }
  void AddNumber(uint64_t number);

  std::string bytes_;
};

// Reading is safe for any bytes. ok() says whether they held all that was read.
class Unpacker {
 public:
  explicit Unpacker(std::string_view bytes) : bytes_(bytes) {}

  template <class... Values>
  bool Read(Values&... values) {
    (ReadOne(values), ...);
    return ok_;
  }
  uint64_t Number();
  std::string Text();
  bool ok() const { return ok_; }

 private:
  template <PackedNumber Value>
  void ReadOne(Value& value) {
    value = static_cast<Value>(Number());
  }
  void ReadOne(double& value) { value = std::bit_cast<double>(Number()); }
  void ReadOne(std::string& value) { value = Text(); }
  void ReadOne(absl::Status& value);
  template <class Value>
  void ReadOne(std::vector<Value>& values) {
    values.clear();
    for (uint64_t left = Number(); left > 0 && ok_; --left) ReadOne(values.emplace_back());
  }

  std::string_view bytes_;
  bool ok_ = true;
};

std::string PackStatus(const absl::Status& status);
absl::Status UnpackStatus(std::string_view payload);

}  // namespace ebb
