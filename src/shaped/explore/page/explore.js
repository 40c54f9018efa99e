const lines = document.getElementById("lines");
const answer = await fetch("answer" + location.search);
const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
for (let part = await reader.read(); !part.done; part = await reader.read()) lines.textContent += part.value;
