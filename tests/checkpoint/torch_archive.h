// Writes files in torch.save's format, so that tests of readers need no torch and can use files
// that torch would not write.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ebb::testing {

struct ZipPart {
  std::string name, bytes;
  uint16_t method = 0;  // 0: stored
  uint16_t flags = 0;
};
struct ZipForm {
  bool zip64 = false;       // records and fields of 64 bits, as of files beyond 4 GiB
  bool descriptors = true;  // sizes behind the data and not in the local header, as torch writes it
  std::string comment = {};
};
std::string Zip(const std::vector<ZipPart>& parts, const ZipForm& form = {});

// Pieces of a pickle of protocol 2; a whole one is Pickled(piece).
struct TensorText {
  std::string storage = "FloatStorage", key = "0";
  std::vector<int64_t> shape = {};
  int64_t stored = -1;                // elements of the storage; -1: those of the shape
  int64_t offset = 0;                 // of the first element
  std::vector<int64_t> strides = {};  // empty: row-major
};
std::string PickledInt(int64_t value);
std::string PickledFloat(double value);
std::string PickledText(std::string_view text);
std::string PickledGlobal(std::string_view module, std::string_view name);
std::string PickledTuple(const std::vector<std::string>& items);
std::string PickledList(const std::vector<std::string>& items);
std::string PickledDict(const std::vector<std::pair<std::string, std::string>>& items);
std::string PickledOrderedDict(const std::vector<std::pair<std::string, std::string>>& items);
std::string PickledSize(const std::vector<int64_t>& sizes);
std::string PickledTensor(const TensorText& tensor);
std::string Pickled(std::string_view piece);

std::string FloatBytes(std::span<const float> values);
// The file of a pickle's piece and of storages "0", "1", ...
std::string TorchArchive(std::string_view piece, const std::vector<std::string>& storages,
                         const ZipForm& form = {});

}  // namespace ebb::testing
