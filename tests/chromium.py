"""A page as a browser shows it: headless Chromium, where there is one."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
TIMEOUT_S = 60.0  # of a machine under load: a second does on an idle one
# Runs in a copy of the page: the page itself has no script.
MEASURE = """<script>
const sizes = {};
for (const one of document.querySelectorAll("figure.plot")) {
  const box = one.querySelector("svg").getBoundingClientRect();
  const texts = [...one.querySelectorAll("svg text")];
  sizes[one.id] = {
    width: box.width, height: box.height, texts: texts.length,
    outside: texts.filter(text => {
      const at = text.getBoundingClientRect();
      return at.right > box.right + 2 || at.left < box.left - 2;
    }).map(text => text.textContent),
  };
}
const told = document.createElement("pre");
told.id = "measured";
told.textContent = JSON.stringify({plots: sizes, page: document.documentElement.scrollWidth});
document.body.append(told);
</script>"""


def measured(page: Path, tmp_path: Path) -> dict:
    """Open a page with no network and return the size of each plot, and the page's width; or skip."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip(
            f"no Chromium here (looked for {', '.join(NAMES)}): apt-get install chromium-headless-shell"
        )
    copy = tmp_path / "measured.html"
    copy.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",  # which a container's root cannot have
        "--disable-gpu",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1200,900",
        "--dump-dom",
        copy.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found = re.search(r'<pre id="measured">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    return json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
