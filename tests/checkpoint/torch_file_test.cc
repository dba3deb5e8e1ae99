// Files of torch.save: archives, pickles and tensors, as torch writes them and as other programs
// may write them.
#include "ebb/runtime/checkpoint/torch_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "ebb/runtime/checkpoint/tensor_source.h"
#include "tests/checkpoint/torch_archive.h"

namespace ebb::testing::torch_file_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

const std::vector<float> kValues = {1, 2, 3, 4, 5, 6};

class TorchFileTest : public ::testing::Test {
 protected:
  TorchFileTest() { fs::create_directories(folder_); }
  ~TorchFileTest() override { fs::remove_all(folder_); }

  std::string Write(const std::string& name, const std::string& bytes) const {
    const std::string path = absl::StrCat(folder_, "/", name);
    std::ofstream(path, std::ios::binary) << bytes;
    return path;
  }
  absl::StatusOr<TorchFile> Open(const std::string& bytes) const {
    return TorchFile::Open(Write("file.pt", bytes), TorchGlobals::kOfTensors);
  }
  void ExpectRefused(const absl::Status& status, absl::StatusCode code, const char* said) const {
    EXPECT_EQ(status.code(), code) << status << ", expected: " << said;
    EXPECT_THAT(std::string(status.message()), HasSubstr(said));
    EXPECT_THAT(std::string(status.message()), HasSubstr(folder_));
  }
  static std::string Param(const TensorText& tensor) {
    return PickledDict({{"param", PickledTensor(tensor)}});
  }

  const std::string folder_ =
      absl::StrCat(::testing::TempDir(), "/torch_file_",
                   ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(TorchFileTest, ATensorOfEitherKindOfArchiveIsRead) {
  for (const bool zip64 : {false, true}) {
    for (const bool descriptors : {false, true}) {
      for (const std::string& comment : {std::string(), std::string(300, 'c')}) {
        const auto file =
            Open(TorchArchive(Param({.shape = {2, 3}}), {FloatBytes(kValues)},
                              {.zip64 = zip64, .descriptors = descriptors, .comment = comment}));
        ASSERT_TRUE(file.ok()) << file.status();
        const PickleValue* const param = file->pickle().Find(file->pickle().root(), "param");
        ASSERT_NE(param, nullptr);
        const auto tensor = file->TensorOf(*param, "param");
        ASSERT_TRUE(tensor.ok()) << tensor.status();
        EXPECT_THAT(tensor->shape, ElementsAre(2, 3));
        EXPECT_EQ(tensor->dtype, DType::kFloat32);
      }
    }
  }
}

TEST_F(TorchFileTest, AModelOfTorchIsATensorSource) {
  const std::vector<float> other = {7, 8};
  fs::create_directory(folder_ + "/model");
  Write("model/config.json", "{}");
  Write("model/pytorch_model.bin",
        TorchArchive(
            PickledOrderedDict({{"a", PickledTensor({.shape = {2, 3}})},
                                {"view", PickledTensor({.shape = {2}, .stored = 6, .offset = 3})},
                                {"count", PickledTensor({.storage = "LongStorage", .key = "1"})},
                                {"scalar", PickledTensor({.key = "2", .stored = 2, .offset = 1})}}),
            {FloatBytes(kValues), std::string(8, '\1'), FloatBytes(other)}));
  const auto source = OpenTensorSource(folder_ + "/model");
  ASSERT_TRUE(source.ok()) << source.status();
  EXPECT_EQ((*source)->description().model_config, "{}");
  ASSERT_EQ((*source)->description().left_out.size(), 1u);
  EXPECT_EQ((*source)->description().left_out[0].name, "count");
  const auto read = [&](size_t tensor, int64_t begin, size_t count) {
    std::vector<float> values(count);
    EXPECT_TRUE((*source)->Read(tensor, begin, values).ok());
    return values;
  };
  ASSERT_EQ((*source)->tensors().size(), 3u);
  EXPECT_THAT(read(0, 1, 4), ElementsAre(2, 3, 4, 5));
  EXPECT_THAT(read(1, 0, 2), ElementsAre(4, 5));
  EXPECT_THAT(read(2, 0, 1), ElementsAre(8));

  // Sharded, with an index.
  fs::remove(folder_ + "/model/pytorch_model.bin");
  for (const int part : {1, 2}) {
    Write(absl::StrCat("model/part-", part, ".bin"),
          TorchArchive(PickledDict({{absl::StrCat("p", part), PickledTensor({.shape = {6}})}}),
                       {FloatBytes(kValues)}));
  }
  const std::string index = "model/pytorch_model.bin.index.json";
  Write(index, R"({"weight_map": {"p1": "part-1.bin", "p2": "part-2.bin"}})");
  const auto sharded = OpenTensorSource(folder_ + "/model");
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  EXPECT_EQ((*sharded)->tensors().size(), 2u);
  Write(index, R"({"weight_map": {"p1": "part-1.bin", "p3": "part-2.bin"}})");
  EXPECT_THAT(std::string(OpenTensorSource(folder_ + "/model").status().message()),
              HasSubstr("has 0 of the 1 tensors"));
  Write(index, R"({"weight_map": {"p1": "../model/part-1.bin"}})");
  EXPECT_THAT(std::string(OpenTensorSource(folder_ + "/model").status().message()),
              HasSubstr("not the plain name"));
}

TEST_F(TorchFileTest, AFileWithoutTensorsIsRefusedWithAReason) {
  using absl::StatusCode::kDataLoss, absl::StatusCode::kInvalidArgument;
  const std::string tensor = PickledTensor({.shape = {6}}), bytes = FloatBytes(kValues);
  struct Wrong {
    std::string piece;
    absl::StatusCode code;
    const char* said;
  };
  for (const Wrong& wrong :
       {Wrong{PickledGlobal("os", "system") + PickledTuple({PickledText("true")}) + "R",
              kInvalidArgument, "names \"os.system\""},
        {PickledText("os") + PickledText("system") + "\x93)R", kInvalidArgument,
         "names \"os.system\""},
        {PickledGlobal("torch", "Tensor") + ")R", kInvalidArgument, "names \"torch.Tensor\""},
        {PickledGlobal("torch._utils", "_rebuild_tensor_v3") + ")R", kInvalidArgument, "tensor_v3"},
        {"ios\nsystem\n)R", kInvalidArgument, "opcode 0x69"},  // INST
        {"I1\n", kInvalidArgument, "opcode 0x49"},
        {PickledDict({{"a", "\x82\x01"}}), kInvalidArgument, "opcode 0x82"},  // EXT1
        {"N" + PickledInt(1), kDataLoss, "leaves values"},
        {"(N", kDataLoss, "leaves values"},
        {"", kDataLoss, "takes a value from an empty stack"},
        {"t", kDataLoss, "lacks a mark"},
        {"}(" + PickledText("a") + "u", kDataLoss, "key without its value"},
        {"N(Nu", kDataLoss, "adds items to a value that is not a container"},
        {"(Na", kDataLoss, "adds items, but the stack is empty"},
        {"h\x07", kDataLoss, "has not stored"},
        {"N)R", kDataLoss, "calls a value that is not a function"},
        {"X\xff\xff\xff\x7f", kDataLoss, "is cut"},
        {"cos", kDataLoss, "is cut"},
        {"\x8a\x60", kDataLoss, "is cut"},
        {std::string("\x80\x09N"), kDataLoss, "protocol 9"},
        // More values than a reader may hold.
        {std::string(static_cast<size_t>(kPickleValuesMax) + 1, 'N'), kInvalidArgument,
         "more than 1048576 values"}})
    ExpectRefused(Open(TorchArchive(wrong.piece, {bytes})).status(), wrong.code, wrong.said);

  // Damage in the tensors.
  const int64_t huge = int64_t{1} << 62;
  struct WrongTensor {
    TensorText text;
    absl::StatusCode code;
    const char* said;
  };
  for (const WrongTensor& wrong :
       {WrongTensor{{.shape = {7}}, kDataLoss, "larger than its storage"},
        {{.shape = {7}, .stored = 6}, kDataLoss, "larger than its storage"},
        {{.shape = {3}, .stored = 6, .offset = 4}, kDataLoss, "larger than its storage"},
        {{.shape = {0}, .stored = 6, .offset = 7}, kDataLoss, "larger than its storage"},
        {{.shape = {1}, .stored = 6, .offset = -1}, kDataLoss, "impossible strides"},
        {{.shape = {huge, huge}, .stored = 6}, kDataLoss, "not a list of sizes"},
        {{.shape = {-1}, .stored = 6}, kDataLoss, "not a list of sizes"},
        {{.shape = {1}, .stored = huge}, kDataLoss, "larger than its storage"},
        {{.storage = "HalfStorage", .shape = {6}}, kDataLoss, "larger than its storage"},
        {{.key = "../../etc/passwd", .shape = {6}}, kDataLoss, "which the file lacks"},
        {{.shape = {2, 3}, .strides = {1, 2}}, kInvalidArgument, "row-major"},
        {{.shape = {2, 3}, .strides = {3}}, kDataLoss, "impossible strides"}}) {
    const auto file = Open(TorchArchive(PickledTensor(wrong.text), {bytes}));
    ASSERT_TRUE(file.ok()) << file.status();
    ExpectRefused(file->TensorOf(file->pickle().root(), "x").status(), wrong.code, wrong.said);
  }
  for (const std::string& piece :
       {PickledGlobal("torch._utils", "_rebuild_tensor_v2") + ")R",
        PickledGlobal("torch._utils", "_rebuild_parameter") + ")R",
        PickledGlobal("torch._utils", "_rebuild_tensor_v2") + "(NNNNNNtR",
        PickledGlobal("torch._utils", "_rebuild_tensor_v2") + "(NQNNNNNtR"}) {
    const auto file = Open(TorchArchive(piece, {}));
    ASSERT_TRUE(file.ok()) << file.status();
    EXPECT_EQ(file->TensorOf(file->pickle().root(), "x").status().code(), kDataLoss);
  }
}

TEST_F(TorchFileTest, AnIncompleteArchiveIsRefusedWithAReason) {
  using absl::StatusCode::kDataLoss, absl::StatusCode::kInvalidArgument;
  const ZipPart pickle = {.name = "a/data.pkl", .bytes = Pickled("N")};
  struct Wrong {
    std::string bytes;
    absl::StatusCode code;
    const char* said;
  };
  ZipPart packed = {.name = "a/data/0", .bytes = "xyz", .method = 8}, locked = packed;
  locked.method = 0;
  locked.flags = 1;
  const std::string whole = Zip({pickle, {.name = "a/data/0", .bytes = "1234"}});
  const auto changed = [&](std::string bytes, size_t from_end, const std::string& to) {
    return bytes.replace(bytes.size() - from_end, to.size(), to);
  };
  // The second entry of the directory is 46 + 8 bytes long, before the end record of 22.
  const size_t second = 22 + 46 + 8;
  const Wrong kWrong[] = {
      {"", kDataLoss, "it has 0 bytes"},
      {std::string(100, 'x'), kDataLoss, "lacks the end record"},
      {whole.substr(0, whole.size() - 1), kDataLoss, "lacks the end record"},
      {Zip({pickle, packed}), kInvalidArgument, "entry \"a/data/0\""},
      {Zip({pickle, packed}), kInvalidArgument, "is compressed (method 8)"},
      {Zip({pickle, locked}), kInvalidArgument, "is encrypted"},
      {Zip({pickle, pickle}), kDataLoss, "is there twice"},
      {Zip({{.name = "data.pkl", .bytes = Pickled("N")}}), kInvalidArgument,
       "not one that torch.save"},
      {Zip({}), kInvalidArgument, "not one that torch.save"},
      {Zip({pickle, {.name = "b/data.pkl", .bytes = Pickled("N")}}), kDataLoss, "two pickles"},
      {Zip({pickle, {.name = "a/byteorder", .bytes = "big"}}), kInvalidArgument, "little-endian"},
      {changed(whole, 6, std::string("\xff\xff\xff\x7f", 4)), kDataLoss, "outside of it"},
      {changed(whole, 10, std::string("\xff\xff\xff\x7f", 4)), kDataLoss, "outside of it"},
      {changed(whole, 12, std::string("\x05\x00", 2)), kDataLoss, "but says 5"},
      {changed(whole, second, "QQQQ"), kDataLoss, "not an entry"},
      {changed(whole, second - 20, std::string(8, '\x7f')), kDataLoss, "more than the file"},
      {changed(whole, second - 24, std::string("\5\0\0\0", 4)), kDataLoss, "two different sizes"},
      {changed(whole, second - 28, std::string("\xff\xff", 2)), kDataLoss, "ends within an entry"},
      {changed(whole, second - 42, std::string("\xff\xff\xff\x7f", 4)), kDataLoss,
       "begins outside"},
      {changed(whole, second - 42, std::string("\x01\0\0\0", 4)), kDataLoss, "has no header"},
      {changed(whole, second - 46, "b"), kDataLoss, "another name"},
  };
  for (const Wrong& wrong : kWrong)
    ExpectRefused(Open(wrong.bytes).status(), wrong.code, wrong.said);

  // Sizes in the directory that reach into the next entry.
  std::string overlapping =
      Zip({pickle, {.name = "a/data/0", .bytes = "1234"}}, {.descriptors = false});
  const size_t first = overlapping.size() - 22 - (46 + 8) - (46 + 10);
  for (const size_t at : {first + 20, first + 24}) overlapping[at] = 40;
  ExpectRefused(Open(overlapping).status(), kDataLoss, "overlap");

  // Any cut, and any wrong zip64 record.
  const std::string large = Zip({pickle, {.name = "a/data/0", .bytes = "1234"}}, {.zip64 = true});
  for (size_t bytes = 0; bytes < large.size(); ++bytes)
    EXPECT_EQ(Open(large.substr(0, bytes)).status().code(), kDataLoss) << bytes;
  for (size_t byte = large.size() - 22 - 20 - 56; byte < large.size() - 22; ++byte) {
    std::string other = large;
    other[byte] = static_cast<char>(other[byte] ^ 0x80);
    (void)Open(other);  // versions and disks are ignored
  }

  const std::string old("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
  ExpectRefused(Open(old).status(), kInvalidArgument, "torch before 1.6");
  fs::create_symlink(Write("there.pt", whole), folder_ + "/link.pt");
  EXPECT_THAT(
      std::string(TorchFile::Open(folder_ + "/link.pt", TorchGlobals::kAny).status().message()),
      HasSubstr("a link is there"));
}

TEST_F(TorchFileTest, AModelHasTensorsWithNamesOnceEachAndNothingElse) {
  const std::string tensor = PickledTensor({.shape = {6}});
  struct Wrong {
    std::string piece;
    const char* said;
  };
  for (const Wrong& wrong : {Wrong{PickledDict({{"a", tensor}, {"a", tensor}}), "\"a\" twice"},
                             {PickledDict({{"a", tensor}, {"epoch", PickledInt(3)}}), "\"epoch\""},
                             {PickledDict({{"model", PickledDict({{"a", tensor}})}}), "\"model\""},
                             {"}(K\x01" + tensor + "u", "not a named tensor"},
                             {PickledList({tensor}), "no dict of tensors"}}) {
    const std::string path = Write("m.bin", TorchArchive(wrong.piece, {FloatBytes(kValues)}));
    ExpectRefused(OpenTensorSource(path).status(), OpenTensorSource(path).status().code(),
                  wrong.said);
  }
}

// A value that holds itself, and one nested as deep as a pickle can be.
TEST_F(TorchFileTest, CirclesAndDepthsAreHarmless) {
  EXPECT_TRUE(Open(TorchArchive("]q\x01h\x01"
                                "a",
                                {}))
                  .ok());
  EXPECT_TRUE(Open(TorchArchive("N" + std::string(1'000'000, '\x85'), {})).ok());
}

}  // namespace
}  // namespace ebb::testing::torch_file_test
