#include "tests/checkpoint/torch_archive.h"

#include <bit>
#include <cstring>

namespace ebb::testing {
namespace {

template <class Number>
std::string Little(Number number) {
  std::string bytes(sizeof(number), '\0');
  std::memcpy(bytes.data(), &number, sizeof(number));
  return bytes;
}

constexpr uint32_t kElsewhere = 0xffffffff;

std::string Sizes(const std::vector<int64_t>& sizes) {
  std::vector<std::string> items;
  for (const int64_t size : sizes) items.push_back(PickledInt(size));
  return PickledTuple(items);
}

std::string Filled(std::string start,
                   const std::vector<std::pair<std::string, std::string>>& items) {
  start += '(';
  for (const auto& [key, value] : items) start += PickledText(key) + value;
  return start + 'u';
}

}  // namespace

std::string Zip(const std::vector<ZipPart>& parts, const ZipForm& form) {
  std::string file, directory;
  for (const ZipPart& part : parts) {
    const uint64_t at = file.size();
    const uint32_t size = static_cast<uint32_t>(part.bytes.size());
    const uint16_t flags = static_cast<uint16_t>(part.flags | (form.descriptors ? 8 : 0));
    // torch pads with an extra field, so that data is aligned.
    const std::string padding = Little(uint16_t{0x4246}) + Little(uint16_t{3}) + "ZZZ";
    file += Little(uint32_t{0x04034b50}) + Little(uint16_t{0}) + Little(flags) +
            Little(part.method) + Little(uint32_t{0}) + Little(uint32_t{0}) +
            Little(form.descriptors ? 0 : size) + Little(form.descriptors ? 0 : size) +
            Little(static_cast<uint16_t>(part.name.size())) +
            Little(static_cast<uint16_t>(padding.size())) + part.name + padding + part.bytes;
    if (form.descriptors)
      file += Little(uint32_t{0x08074b50}) + Little(uint32_t{0}) + Little(size) + Little(size);
    std::string extra;
    if (form.zip64) {
      extra = Little(uint16_t{1}) + Little(uint16_t{24}) + Little(uint64_t{size}) +
              Little(uint64_t{size}) + Little(at);
    }
    directory += Little(uint32_t{0x02014b50}) + Little(uint16_t{0}) + Little(uint16_t{0}) +
                 Little(flags) + Little(part.method) + Little(uint32_t{0}) + Little(uint32_t{0}) +
                 Little(form.zip64 ? kElsewhere : size) + Little(form.zip64 ? kElsewhere : size) +
                 Little(static_cast<uint16_t>(part.name.size())) +
                 Little(static_cast<uint16_t>(extra.size())) + Little(uint16_t{0}) +
                 Little(uint16_t{0}) + Little(uint16_t{0}) + Little(uint32_t{0}) +
                 Little(form.zip64 ? kElsewhere : static_cast<uint32_t>(at)) + part.name + extra;
  }
  const uint64_t begin = file.size(), count = parts.size(), bytes = directory.size();
  file += directory;
  if (form.zip64) {
    const uint64_t record = file.size();
    file += Little(uint32_t{0x06064b50}) + Little(uint64_t{44}) + Little(uint32_t{0}) +
            Little(uint32_t{0}) + Little(uint32_t{0}) + Little(count) + Little(count) +
            Little(bytes) + Little(begin) + Little(uint32_t{0x07064b50}) + Little(uint32_t{0}) +
            Little(record) + Little(uint32_t{1});
  }
  const auto count16 = static_cast<uint16_t>(form.zip64 ? 0xffff : count);
  return file + Little(uint32_t{0x06054b50}) + Little(uint32_t{0}) + Little(count16) +
         Little(count16) + Little(form.zip64 ? kElsewhere : static_cast<uint32_t>(bytes)) +
         Little(form.zip64 ? kElsewhere : static_cast<uint32_t>(begin)) +
         Little(static_cast<uint16_t>(form.comment.size())) + form.comment;
}

std::string PickledInt(int64_t value) {
  if (value >= 0 && value < 256) return "K" + Little(static_cast<uint8_t>(value));
  if (value == static_cast<int32_t>(value)) return "J" + Little(static_cast<int32_t>(value));
  return "\x8a\x08" + Little(value);
}
std::string PickledFloat(double value) {
  return "G" + Little(__builtin_bswap64(std::bit_cast<uint64_t>(value)));
}
std::string PickledText(std::string_view text) {
  return "X" + Little(static_cast<uint32_t>(text.size())) + std::string(text);
}
std::string PickledGlobal(std::string_view module, std::string_view name) {
  return "c" + std::string(module) + "\n" + std::string(name) + "\n";
}
std::string PickledTuple(const std::vector<std::string>& items) {
  std::string text = "(";
  for (const std::string& item : items) text += item;
  return text + "t";
}
std::string PickledList(const std::vector<std::string>& items) {
  std::string text = "](";
  for (const std::string& item : items) text += item;
  return text + "e";
}
std::string PickledDict(const std::vector<std::pair<std::string, std::string>>& items) {
  return Filled("}", items);
}
std::string PickledOrderedDict(const std::vector<std::pair<std::string, std::string>>& items) {
  return Filled(PickledGlobal("collections", "OrderedDict") + ")R", items);
}
std::string PickledSize(const std::vector<int64_t>& sizes) {
  return PickledGlobal("torch", "Size") + PickledTuple({Sizes(sizes)}) + "R";
}
std::string PickledTensor(const TensorText& tensor) {
  int64_t elements = 1;
  std::vector<int64_t> strides(tensor.shape.size());
  for (size_t d = strides.size(); d-- > 0;) {
    strides[d] = elements;
    elements *= tensor.shape[d];
  }
  const std::string id = PickledTuple(
      {PickledText("storage"), PickledGlobal("torch", tensor.storage), PickledText(tensor.key),
       PickledText("cpu"), PickledInt(tensor.stored < 0 ? elements : tensor.stored)});
  return PickledGlobal("torch._utils", "_rebuild_tensor_v2") +
         PickledTuple({id + "Q", PickledInt(tensor.offset), Sizes(tensor.shape),
                       Sizes(tensor.strides.empty() ? strides : tensor.strides), "\x89",
                       PickledOrderedDict({})}) +
         "R";
}
std::string Pickled(std::string_view piece) {
  return "\x80\x02" + std::string(piece) + ".";
}

std::string FloatBytes(std::span<const float> values) {
  std::string bytes(values.size_bytes(), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

std::string TorchArchive(std::string_view piece, const std::vector<std::string>& storages,
                         const ZipForm& form) {
  std::vector<ZipPart> parts = {{.name = "archive/data.pkl", .bytes = Pickled(piece)},
                                {.name = "archive/byteorder", .bytes = "little"}};
  for (size_t i = 0; i < storages.size(); ++i)
    parts.push_back({.name = "archive/data/" + std::to_string(i), .bytes = storages[i]});
  parts.push_back({.name = "archive/version", .bytes = "3\n"});
  return Zip(parts, form);
}

}  // namespace ebb::testing
