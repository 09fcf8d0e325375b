{% include "sort.js" %}

// Fetches the page again every few seconds and shows its new content, unless its reader is in the middle of it.
// The page needs none of it.
const seconds = Number(document.body.dataset.refresh);
if (seconds) {
  const main = document.querySelector("main"), state = document.getElementById("state");
  const button = document.createElement("button");
  let paused = false, tag = "";
  button.type = "button";
  const label = () => { button.textContent = paused ? "Resume updates" : "Pause updates"; };
  button.addEventListener("click", () => { paused = !paused; label(); });
  label();
  state.before(button);
  const reading = () => document.hidden || (main !== document.activeElement && main.contains(document.activeElement))
    || getSelection().toString() !== "" || main.querySelector("details[open]") !== null;
  setInterval(async () => {
    if (paused || reading()) return;
    try {
      const answer = await fetch(location.href, { cache: "no-cache", signal: AbortSignal.timeout(20000) });
      if (!answer.ok) throw new Error(answer.status);
      if (state.textContent) state.textContent = "";
      if (answer.headers.get("ETag") === tag) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      if (paused || reading()) return;
      tag = answer.headers.get("ETag");
      main.replaceChildren(...page.querySelector("main").childNodes);
    } catch {
      const text = "No answer: this page is not up to date.";
      if (state.textContent !== text) state.textContent = text;
    }
  }, 1000 * seconds);
}
