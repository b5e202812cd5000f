#!/bin/sh
# Pid 1 of namespaces of its own: makes a root that it shares with nobody, moves into it, proves that
# it is alone there, and becomes systemd. Nothing that systemd does (tmpfiles, sysctl, journald) can
# reach the real disk, /tmp, /run, /dev or the kernel's settings.
#
#   LAB    directory with `binds` (lines SOURCE TARGET, mounted read-only) and `prepare`, a script
#          that is run in the new root before systemd
#   OUTER  names of the namespaces of whoever has started this, one a word
#   MARK   a file in the /tmp of whoever has started this
#
# Exit code 77: this machine cannot do it, the last line says why. 99: not isolated.
set -eu
: "${LAB:?}" "${OUTER:?}" "${MARK:?}"
step="namespaces"
trap 'code=$?; [ $code = 0 ] || [ $code = 99 ] || { echo "cannot: $step"; exit 77; }' EXIT

refuse() { echo "NOT ISOLATED: $1"; exit 99; }

[ -e "$MARK" ] || refuse "there is no $MARK to look for"
[ $$ = 1 ] || refuse "this is process $$, not the first of its own"
for kind in mnt pid cgroup ipc uts net; do
  own=$(readlink "/proc/self/ns/$kind")
  case " $OUTER " in *" $own "*) refuse "namespace $kind is shared" ;; esac
done

step="a private tree of mounts"
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /mnt
mkdir /mnt/upper /mnt/work /mnt/root
step="an overlay over the root"
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/upper,workdir=/mnt/work /mnt/root
root=/mnt/root

step="mounts below the root"
findmnt -rn -o TARGET | grep -E '^/(usr|lib|lib64)(/|$)|^/opt/.' | sort | while read -r target; do
  [ -d "$target" ] || continue
  mount --bind "$target" "$root$target"
  mount -o remount,bind,ro "$root$target"
done

step="folders of its own"
for folder in tmp var/tmp run dev root home etc/systemd; do
  mkdir -p "$root/$folder"
  mount -t tmpfs -o mode=755 tmpfs "$root/$folder"
done
: > "$root/etc/fstab"
chmod 1777 "$root/tmp" "$root/var/tmp"
chmod 700 "$root/root"
mkdir -p "$root/run/systemd/system" "$root/run/lock" "$root/dev/shm" "$root/dev/pts"

step="devices"
for node in null zero full random urandom tty; do
  touch "$root/dev/$node"
  mount --bind "/dev/$node" "$root/dev/$node"
done
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"

step="proc, sys and cgroups"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"

step="what is served"
while read -r source target; do
  mkdir -p "$root$target"
  mount --bind "$source" "$root$target"
  mount -o remount,bind,ro "$root$target"
done < "$LAB/binds"
cp "$LAB/prepare" "$root/run/prepare"

# What would look after real hardware and disks, or do what the machine does now and then.
for unit in systemd-sysctl modprobe@ systemd-modules-load systemd-binfmt systemd-remount-fs systemd-timesyncd \
  systemd-udevd systemd-udev-trigger systemd-random-seed systemd-tmpfiles-setup \
  systemd-tmpfiles-setup-dev systemd-tmpfiles-clean systemd-update-utmp systemd-sysusers; do
  ln -sf /dev/null "$root/run/systemd/system/$unit.service"
done
for unit in timers.target paths.target dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount \
  sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount \
  proc-sys-fs-binfmt_misc.automount; do
  ln -sf /dev/null "$root/run/systemd/system/$unit"
done
printf '[Unit]\nDescription=lab\nRequires=basic.target\nAfter=basic.target\n' > "$root/run/systemd/system/lab.target"

step="a root of its own"
cd "$root"
mkdir -p outer
pivot_root . outer
exec < /dev/null
cd /
umount -l /outer
rmdir /outer
# As on a machine, where units get their credentials by it; it reaches no further than these namespaces.
mount --make-rshared /

[ "$(findmnt -n -o FSTYPE /)" = overlay ] || refuse "the root is no overlay"
[ ! -e "$MARK" ] || refuse "the outer /tmp is visible"
for folder in /tmp /var/tmp /run /dev /root /home /etc/systemd; do
  [ "$(findmnt -n -o FSTYPE "$folder")" = tmpfs ] || refuse "$folder is no tmpfs"
done
for folder in /proc/sys /sys; do
  case ",$(findmnt -n -o OPTIONS "$folder" | tail -1)," in *,ro,*) ;; *) refuse "$folder is writable" ;; esac
done
echo "isolated"

step="to prepare the root"
sh /run/prepare
trap - EXIT
echo lab > /etc/hostname
export container=lab PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec /lib/systemd/systemd --system --unit=lab.target --log-target=journal --log-level=info --show-status=no
