// The library that opened_library_test.cc opens, built in several ways.
extern "C" {

int EbbTestVersion() {
#if defined(EBB_TEST_IS_OLD)
  return 21704;
#elif defined(EBB_TEST_IS_NEXT)
  return 30000;
#else
  return 21901;
#endif
}

#if !defined(EBB_TEST_IS_LACKING)
int EbbTestSquare(int x) {
  return x * x;
}
#endif

}  // extern "C"
