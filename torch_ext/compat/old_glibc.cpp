// Keeps libqkv.so from asking for a newer glibc than torch does, as csrc/common/old_glibc.h does
// for the kernels. std::shared_ptr reads this variable of glibc 2.32 to count without atomic
// operations in a program that has one thread. A variable of our own that says "there may be
// several" takes its place within libqkv.so.
extern "C" {
extern __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;
}
