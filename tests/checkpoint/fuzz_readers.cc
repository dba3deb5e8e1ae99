// A fuzz target in libFuzzer's form over the readers of files that may come from anywhere; fuzz.sh
// builds and runs it. The first byte picks the reader: the header of safetensors, a manifest (with
// the right checksum, as an attacker writes it), an index. Aborts if a law is broken: an error is
// kDataLoss or kInvalidArgument, and accepted ranges lie in the file.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "ebb/optim/checksum.h"
#include "ebb/runtime/checkpoint/manifest.h"
#include "ebb/runtime/checkpoint/model_files.h"
#include "ebb/runtime/checkpoint/rank_file.h"
#include "ebb/runtime/checkpoint/safetensors.h"

namespace ebb {
namespace {

void Require(bool holds, const char* law) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", law);
  std::abort();
}

void RequireRefused(const absl::Status& status) {
  // A manifest of a later version fails a precondition.
  Require(absl::IsDataLoss(status) || absl::IsInvalidArgument(status) ||
              absl::IsFailedPrecondition(status),
          "the code of an error");
  Require(!status.message().empty(), "an error's message");
}

void ReadHeader(std::string_view text) {
  const int64_t data_bytes = text.empty() ? 0 : static_cast<uint8_t>(text.back());
  const int64_t bytes = 8 + static_cast<int64_t>(text.size()) + data_bytes;
  const auto header = ParseSafetensorsHeader(text, bytes, "file");
  if (!header.ok()) return RequireRefused(header.status());
  int64_t end = 0;
  for (const StoredTensor& tensor : header->tensors) {
    Require(tensor.begin == end && tensor.end >= end, "tensors end to end");
    end = tensor.end;
    if (const auto slice = ParseSliceName(tensor.name))
      Require(ParseSliceName(NameOf(*slice)) == slice, "a slice's name there and back");
  }
  Require(end == data_bytes, "tensors fill the file");
}

void ReadManifestText(std::string text) {
  constexpr std::string_view kField = "\"checksum\": \"";
  const size_t digits = text.find(kField);
  if (digits != std::string::npos && digits + kField.size() + 16 <= text.size()) {
    text.replace(digits + kField.size(), 16, std::string(16, '0'));
    const uint64_t sum = optim::Checksum(std::as_bytes(std::span(text)));
    text.replace(digits + kField.size(), 16, absl::StrFormat("%016x", sum));
  }
  const auto manifest = ParseManifest(text, "manifest.json");
  if (!manifest.ok()) return RequireRefused(manifest.status());
  const auto again = ParseManifest(ToText(*manifest), "manifest.json");
  Require(again.ok() && *again == *manifest, "a manifest there and back");
}

void ReadIndex(const std::string& text) {
  const auto index = ParseModelIndex(text, "index");
  if (!index.ok()) return RequireRefused(index.status());
  for (const auto& [tensor, file] : *index)
    Require(!file.empty() && file.front() != '.' && file.find('/') == std::string::npos &&
                file.find('\0') == std::string::npos,
            "plain names");
}

}  // namespace
}  // namespace ebb

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  switch (data[0] % 3) {
    case 0:
      ebb::ReadHeader(rest);
      break;
    case 1:
      ebb::ReadManifestText(std::string(rest));
      break;
    default:
      ebb::ReadIndex(std::string(rest));
  }
  return 0;
}
